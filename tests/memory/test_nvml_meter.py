from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest

from pytest_vllm_cleanup.memory.meters.nvml import NvmlMeter

ME = os.getpid()
CHILD = os.getppid()  # exists, and is not this process
GIB = 1 << 30
NOBODY = frozenset()
NOT_A_PID = 2**22 + 1  # above the kernel's largest


def read(nvml, ours=NOBODY, environ=None, device="cuda:0"):
    return NvmlMeter(environ or {}, module=nvml).read(ours)[device]


def test_a_device_is_read_whole_and_by_process(fake_nvml, card, driver_users):
    driver_users.add(CHILD)
    nvml = fake_nvml(card(used=20 * GIB, compute=[(ME, GIB), (CHILD, 14 * GIB), (1, 5 * GIB)]))
    reading = read(nvml, frozenset({CHILD}))
    assert (reading.used, reading.total, reading.identity) == (20 * GIB, 140 * GIB, "GPU-aaaa0000")
    assert (reading.own, reading.children) == (GIB, 14 * GIB)
    assert reading.others == (5 * GIB if CHILD != 1 else 0)
    assert (reading.allocated, reading.reserved) == (None, None)
    assert {use.pid: use.ours for use in reading.processes}[ME] is True
    assert next(use.name for use in reading.processes if use.pid == ME)


def test_a_device_that_nobody_uses_has_known_zeros(fake_nvml, card):
    reading = read(fake_nvml(card()))
    assert (reading.own, reading.children, reading.others, reading.processes) == (0, 0, 0, ())


def test_desktop_programs_are_others_and_counted_once(fake_nvml, card, driver_users):
    nvml = fake_nvml(card(compute=[(CHILD, GIB)], graphics=[(CHILD, GIB), (ME, None)]))
    driver_users.add(ME)
    reading = read(nvml)
    assert reading.others == GIB
    assert len(reading.processes) == 2


def test_clients_of_the_multi_process_service_count(fake_nvml, card, driver_users):
    driver_users.add(CHILD)
    nvml = fake_nvml(card(compute=[]))
    nvml.nvmlDeviceGetMPSComputeRunningProcesses_v2 = lambda _device: [
        SimpleNamespace(pid=CHILD, usedGpuMemory=3 * GIB)
    ]
    assert read(nvml, frozenset({CHILD})).children == 3 * GIB


def test_an_older_driver_lists_processes_by_the_older_call(fake_nvml, card):
    nvml = fake_nvml(card(compute=[(CHILD, GIB)]))
    listing = nvml.nvmlDeviceGetComputeRunningProcesses
    nvml.nvmlDeviceGetComputeRunningProcesses = None
    nvml.nvmlDeviceGetComputeRunningProcesses_v2 = listing
    assert read(nvml).others == GIB


def test_the_real_module_has_the_functions_that_are_used(fake_nvml):
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(fake_nvml) if name.startswith(("nvml", "NVMLError"))]
    assert len(used) > 12
    older = ["nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v2"]
    assert [name for name in [*used, *older] if not hasattr(pynvml, name)] == []


def test_the_real_library_answers_or_says_why_not():
    meter = NvmlMeter({})
    assert meter.available() is not bool(meter.reason)
    assert bool(meter.read(NOBODY)) is meter.available()


@pytest.mark.parametrize("size", [None, 2**64 - 1, 0])
def test_a_size_that_the_driver_does_not_tell_is_unknown_not_zero(fake_nvml, card, size, driver_users):
    driver_users.add(CHILD)
    reading = read(fake_nvml(card(compute=[(ME, GIB), (CHILD, size)])), frozenset({CHILD}))
    assert (reading.own, reading.children, reading.others) == (GIB, None, 0)
    assert next(use.bytes for use in reading.processes if use.pid == CHILD) is None


def test_in_a_container_the_hosts_process_ids_are_strangers(fake_nvml, card, driver_users):
    driver_users.add(CHILD)
    nvml = fake_nvml(card(used=15 * GIB, compute=[(NOT_A_PID, 14 * GIB)]))
    reading = read(nvml, frozenset({CHILD}))
    assert (reading.own, reading.children, reading.others, reading.used) == (None, None, None, 15 * GIB)
    assert [(use.pid, use.bytes, use.ours) for use in reading.processes] == [(NOT_A_PID, 14 * GIB, False)]


def test_a_process_that_cannot_be_ours_is_another_whatever_its_number(fake_nvml, card):
    reading = read(fake_nvml(card(compute=[(NOT_A_PID, 14 * GIB)])))
    assert (reading.own, reading.children, reading.others) == (0, 0, 14 * GIB)


def test_without_our_own_context_in_the_list_nobody_in_it_is_known(fake_nvml, card, fake_torch):
    fake_torch({0: (0, 0)})
    reading = read(fake_nvml(card(compute=[(CHILD, GIB)])), frozenset({CHILD}))
    assert (reading.own, reading.children, reading.others) == (None, None, None)
    assert [use.ours for use in reading.processes] == [False]
    assert read(fake_nvml(card())).own is None


def test_with_our_own_context_in_the_list_it_is_believed(fake_nvml, card, fake_torch):
    fake_torch({0: (0, 0)})
    assert read(fake_nvml(card(compute=[(ME, GIB)]))).own == GIB


def test_a_process_that_has_just_ended_does_not_unsettle_what_was_seen(fake_nvml, card, driver_users):
    driver_users.add(CHILD)
    device = card(compute=[(CHILD, GIB)])
    meter = NvmlMeter({}, module=fake_nvml(device))
    assert meter.read(frozenset({CHILD}))["cuda:0"].children == GIB
    device.compute = [(NOT_A_PID, GIB)]
    reading = meter.read(frozenset({CHILD}))["cuda:0"]
    assert (reading.children, reading.others) == (0, GIB)


def test_the_second_version_of_the_memory_call_is_preferred(fake_nvml, card):
    nvml = fake_nvml(card(used=GIB))
    assert read(nvml).used == GIB
    assert nvml.calls == [("memory", nvml.nvmlMemory_v2)]


def test_the_first_version_serves_where_there_is_no_second(fake_nvml, card):
    nvml = fake_nvml(card(used=GIB, second_version=False))
    assert read(nvml).used == GIB + (900 << 20)
    wrapper = fake_nvml(card(used=GIB))
    wrapper.nvmlMemory_v2 = None
    assert read(wrapper).used == GIB + (900 << 20)


@pytest.mark.parametrize("started_with", [True, False])
def test_two_readings_never_come_from_different_calls(fake_nvml, card, started_with):
    device = card(used=GIB, second_version=started_with)
    nvml = fake_nvml(device)
    meter = NvmlMeter({}, module=nvml)
    first = meter.read(NOBODY)["cuda:0"].used
    device.second_version = not started_with
    second = meter.read(NOBODY)["cuda:0"].used
    assert second in (None, first)


def test_what_may_not_be_read_is_none_and_said(fake_nvml, card):
    nvml = fake_nvml()
    refusal = nvml.NVMLError_NoPermission("Insufficient Permissions")
    nvml.cards = (card(memory_error=refusal, list_error=refusal),)
    meter = NvmlMeter({}, module=nvml)
    reading = meter.read(NOBODY)["cuda:0"]
    assert (reading.used, reading.total, reading.own, reading.processes) == (None, None, None, None)
    assert "cuda:0" in meter.reason
    assert "Insufficient Permissions" in meter.reason


@pytest.mark.usefixtures("driver_users")
def test_memory_without_processes_and_processes_without_memory(fake_nvml, card):
    nvml = fake_nvml()
    nvml.cards = (card(used=GIB, list_error=nvml.NVMLError_NotSupported("Not Supported")),)
    reading = read(nvml)
    assert (reading.used, reading.own, reading.processes) == (GIB, None, None)
    nvml.cards = (card(memory_error=nvml.NVMLError_NotSupported(), compute=[(ME, GIB)]),)
    reading = read(nvml)
    assert (reading.used, reading.own) == (None, GIB)


def test_visible_devices_are_read_under_the_callers_numbers(fake_nvml, card):
    nvml = fake_nvml(card("GPU-a", used=1), card("GPU-b", used=2), card("GPU-c", used=3))
    readings = NvmlMeter({"CUDA_VISIBLE_DEVICES": "2,1"}, module=nvml).read(NOBODY)
    assert {name: reading.used for name, reading in readings.items()} == {"cuda:0": 3, "cuda:1": 2}


def test_the_variable_is_read_once(fake_nvml, card):
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    meter = NvmlMeter(environ, module=fake_nvml(card("GPU-a"), card("GPU-b")))
    environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert meter.read(NOBODY)["cuda:0"].identity == "GPU-b"


def test_once_cuda_is_up_devices_are_matched_by_uuid(fake_nvml, card, fake_torch):
    meter = NvmlMeter({}, module=fake_nvml(card("GPU-a", model="T4"), card("GPU-b")))
    assert meter.read(NOBODY)["cuda:0"].identity == "GPU-a"
    fake_torch({}, uuids=("b", "a"))
    assert meter.read(NOBODY)["cuda:0"].identity == "GPU-b"


def test_a_torch_without_uuids_is_matched_by_number(fake_nvml, card, fake_torch):
    fake_torch({}, uuids=(None,))
    assert read(fake_nvml(card("GPU-a"))).identity == "GPU-a"


def test_cards_that_cannot_be_told_apart_are_not_measured(fake_nvml, card):
    meter = NvmlMeter({"CUDA_VISIBLE_DEVICES": "0"}, module=fake_nvml(card(model="T4"), card("GPU-b")))
    assert meter.read(NOBODY)["cuda:0"].used is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in meter.reason


def test_an_instance_is_read_instead_of_its_card(fake_nvml, card):
    nvml = fake_nvml(card(used=90 * GIB, instances=[card("MIG-1", used=1 * GIB), card("MIG-2", used=2 * GIB)]))
    assert read(nvml, environ={"CUDA_VISIBLE_DEVICES": "MIG-2"}).used == 2 * GIB
    assert read(nvml).used == GIB


def test_an_instance_that_cannot_be_looked_up_is_unknown_and_named(fake_nvml, card):
    meter = NvmlMeter({"CUDA_VISIBLE_DEVICES": "MIG-9"}, module=fake_nvml(card(used=9)))
    reading = meter.read(NOBODY)["cuda:0"]
    assert (reading.used, reading.own, reading.identity) == (None, None, "MIG-9")
    assert "MIG-9" in meter.reason


def test_the_library_is_initialised_once(fake_nvml, card):
    nvml = fake_nvml(card())
    meter = NvmlMeter({}, module=nvml)
    assert meter.available()
    meter.read(NOBODY)
    meter.read(NOBODY)
    assert nvml.inits == 1


def test_the_library_is_initialised_again_after_a_fork_or_a_foreign_shutdown(fake_nvml, card, monkeypatch):
    nvml = fake_nvml(card(used=GIB))
    meter = NvmlMeter({}, module=nvml)
    meter.read(NOBODY)
    nvml.up = False
    assert meter.read(NOBODY)["cuda:0"].used == GIB
    assert nvml.inits == 2
    monkeypatch.setattr(os, "getpid", lambda: NOT_A_PID)
    assert meter.read(NOBODY)["cuda:0"].used == GIB
    assert nvml.inits == 3


def test_without_driver_or_device_nothing_is_available(fake_nvml, card):
    nvml = fake_nvml(card())
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError("NVML Shared Library Not Found"))
    meter = NvmlMeter({}, module=nvml)
    assert not meter.available()
    assert meter.read(NOBODY) == {}
    assert "Shared Library Not Found" in meter.reason
    hiding = NvmlMeter({"CUDA_VISIBLE_DEVICES": ""}, module=fake_nvml(card()))
    assert not hiding.available()
    assert "no device is visible" in hiding.reason


def test_without_the_module_nothing_is_available(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = NvmlMeter({})
    assert not meter.available()
    assert "pynvml" in meter.reason


def test_a_failure_is_forgotten_when_it_is_over(fake_nvml, card):
    nvml = fake_nvml(card())
    init, nvml.nvmlInit = nvml.nvmlInit, None
    meter = NvmlMeter({}, module=nvml)
    assert not meter.available()
    nvml.nvmlInit = init
    assert meter.available()
    assert meter.reason == ""


def test_after_a_hang_the_driver_is_not_asked_again(fake_nvml, card, stuck):
    nvml = fake_nvml(card())
    nvml.hang = stuck
    meter = NvmlMeter({}, module=nvml, deadline=0.05)
    assert meter.read(NOBODY) == {}
    assert "0.05 s" in meter.reason
    stuck.set()
    start = time.monotonic()
    assert meter.read(NOBODY) == {}
    assert not meter.available()
    assert time.monotonic() - start < 0.04
    assert "asked no more" in meter.reason


def test_nothing_of_ours_can_be_on_a_device_without_a_process_that_uses_the_driver(fake_nvml, card, driver_users):
    driver_users.clear()
    meter = NvmlMeter({}, module=fake_nvml(card(used=14 * GIB, compute=[(NOT_A_PID, 14 * GIB)])))
    alone = meter.read(frozenset({ME, CHILD}))["cuda:0"]
    assert (alone.absent, alone.listed, alone.others) == (True, False, 14 * GIB)
    driver_users.add(CHILD)
    with_engine = meter.read(frozenset({ME, CHILD}))["cuda:0"]
    assert (with_engine.absent, with_engine.children, with_engine.others) == (False, None, None)
    assert [use.pid for use in with_engine.living] == [CHILD]


def test_a_list_in_which_none_of_ours_was_ever_seen_is_not_believed(fake_nvml, card, driver_users):
    # Process 1 is there in every container, and is the sandbox itself in the list of some.
    driver_users.add(CHILD)
    reading = read(fake_nvml(card(used=14 * GIB, compute=[(1, 14 * GIB)])), frozenset({ME, CHILD}))
    assert (reading.listed, reading.children, reading.others) == (False, None, None)


def test_one_of_ours_on_another_device_shows_whose_numbers_are_listed(fake_nvml, card, driver_users):
    driver_users.add(CHILD)
    nvml = fake_nvml(card("GPU-a", used=GIB, compute=[(NOT_A_PID, GIB)]), card("GPU-b", compute=[(CHILD, GIB)]))
    reading = read(nvml, frozenset({ME, CHILD}))
    assert (reading.listed, reading.children, reading.others) == (True, 0, GIB)


def test_a_process_that_has_by_chance_the_number_of_one_of_ours_is_not_taken_for_it(fake_nvml, card, driver_users):
    # Ours is a helper that has nothing to do with the driver.
    driver_users.clear()
    reading = read(fake_nvml(card(used=GIB, compute=[(CHILD, GIB)])), frozenset({ME, CHILD}))
    assert (reading.children, reading.others) == (0, GIB)
    assert [(use.ours, use.name) for use in reading.processes] == [(False, None)]


def test_a_context_of_this_process_counts_on_its_own_device_alone(fake_nvml, card, fake_torch):
    fake_torch({1: (0, 0)}, uuids=("a", "b"))
    readings = NvmlMeter({}, module=fake_nvml(card("GPU-a"), card("GPU-b"))).read(NOBODY)
    assert [readings[name].context for name in ("cuda:0", "cuda:1")] == [False, True]
