"""Machines that this project has none of, as the driver's library shows them."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace

import pytest
from fake_nvml import GIB, FakeNvml, make_card

from pytest_vllm_cleanup.devices import arrival, from_environment, inventory
from pytest_vllm_cleanup.devices.offered import offer
from pytest_vllm_cleanup.devices.sharing import is_shared, sharers
from pytest_vllm_cleanup.memory.meters.nvml import NvmlMeter

NOBODY = frozenset()
NOT_SUPPORTED = FakeNvml.NVMLError_NotSupported("Not Supported")


def read(nvml, **environ):
    meter = NvmlMeter(environ, module=nvml)
    return meter.read(NOBODY), meter.reason


def test_cards_are_listed_and_the_library_is_left_as_it_was():
    nvml = FakeNvml(make_card("GPU-a"), make_card(b"GPU-b", model=b"NVIDIA T4"))
    found = inventory.take(nvml)
    assert [(card.index, card.uuid, card.model) for card in found.cards] == [
        (0, "GPU-a", "NVIDIA H200"),
        (1, "GPU-b", "NVIDIA T4"),
    ]
    assert found.reason == ""
    assert (nvml.inits, nvml.up) == (1, False)


def test_no_card_no_driver_and_a_hanging_driver_are_told():
    assert inventory.take(FakeNvml()).reason == "NVML lists no device"
    broken = FakeNvml(make_card())
    broken.nvmlInit = lambda: (_ for _ in ()).throw(FakeNvml.NVMLError("Driver Not Loaded"))
    assert inventory.take(broken).reason == "NVML: NVMLError: Driver Not Loaded"
    hanging = FakeNvml(make_card())
    hanging.hang = threading.Event()
    assert inventory.take(hanging, deadline=0.05).reason == "NVML did not answer within 0.05 s"
    hanging.hang.set()


def test_mig_without_permission_is_never_read_as_its_card():
    nvml = FakeNvml(make_card("GPU-a", used=90 * GIB, locked=True), make_card("GPU-b", used=GIB))
    cards = inventory.take(nvml).cards
    assert [card.partitioned for card in cards] == [True, False]
    first, second = from_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, cards)
    assert (first.uuid, second.uuid) == (None, "GPU-b")
    readings, reason = read(nvml, CUDA_VISIBLE_DEVICES="0")
    assert readings["cuda:0"].used is None
    assert "name one in CUDA_VISIBLE_DEVICES (MIG-...)" in reason


def test_mig_instance_by_name_is_read_where_it_may_be():
    instance = make_card("MIG-1", used=3 * GIB)
    nvml = FakeNvml(make_card("GPU-a", used=90 * GIB, locked=True, instances=[instance]))
    readings, _ = read(nvml, CUDA_VISIBLE_DEVICES="MIG-1")
    assert (readings["cuda:0"].used, readings["cuda:0"].identity) == (3 * GIB, "MIG-1")
    instance.memory_error = FakeNvml.NVMLError_NoPermission("Insufficient Permissions")
    instance.list_error = instance.memory_error
    readings, reason = read(nvml, CUDA_VISIBLE_DEVICES="MIG-1")
    assert readings["cuda:0"].used is None
    assert "Insufficient Permissions" in reason


def test_unified_memory_without_a_memory_query_can_be_given_to_a_worker_and_not_be_measured():
    gb10 = make_card("GPU-a", model="NVIDIA GB10", memory_error=NOT_SUPPORTED)
    nvml = FakeNvml(gb10)
    assert [device.text for device in offer({}, inventory.take(nvml).cards).devices] == ["0"]
    reading = read(nvml)[0]["cuda:0"]
    assert (reading.used, reading.total) == (None, None)
    assert reading.processes == ()
    gb10.list_error = NOT_SUPPORTED
    assert "Not Supported" in read(nvml)[1]


def test_wsl_tells_the_device_and_no_process():
    nvml = FakeNvml(make_card("GPU-a", used=5 * GIB, list_error=NOT_SUPPORTED))
    readings, _ = read(nvml)
    assert (readings["cuda:0"].used, readings["cuda:0"].processes) == (5 * GIB, None)


def test_in_a_container_processes_have_the_numbers_of_the_host():
    nvml = FakeNvml(make_card("GPU-a", used=5 * GIB, compute=[(4_000_000, 4 * GIB)]))
    reading = read(nvml)[0]["cuda:0"]
    assert [(use.pid, use.ours) for use in reading.processes] == [(4_000_000, False)]
    assert not reading.listed


def test_devices_beside_those_that_cuda_sees_here_are_read_for_processes_that_see_them(monkeypatch):
    from pytest_vllm_cleanup.memory.meters import nvml as meter

    nvml = FakeNvml(make_card("GPU-a", used=GIB), make_card("GPU-b", used=2 * GIB))
    monkeypatch.setattr(meter, "initialised_torch", lambda: object())
    monkeypatch.setattr(meter, "cuda_uuids", lambda _torch: ("b",))
    monkeypatch.setattr(meter, "may_have_context", lambda _ordinal: False)
    environ = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert list(NvmlMeter(environ, module=nvml).read(NOBODY)) == ["cuda:0"]
    readings = NvmlMeter(environ, module=nvml, widened=True).read(NOBODY)
    assert [(name, reading.identity) for name, reading in readings.items()] == [
        ("cuda:0", "GPU-b"),
        ("cuda:1", "GPU-a"),
    ]


def module(name, **members):
    made = ModuleType(name)
    vars(made).update(members)
    return made


TORCH = module("torch", cuda=SimpleNamespace(is_initialized=lambda: True))


@pytest.mark.parametrize(
    ("modules", "phrase"),
    [
        ({"torch": TORCH}, "by torch"),
        (
            {"torch": TORCH, "torch.nn": module("nn", torch=TORCH), "site": module("site", t=TORCH)},
            "which site imported",
        ),
        ({"torch": TORCH, "mine": module("mine", torch=TORCH, __file__="/m.py")}, "which mine imported (/m.py)"),
        ({"os": module("os")}, "by something that is not a module known to use it"),
    ],
)
def test_who_started_cuda_is_told_as_far_as_modules_tell(modules, phrase):
    assert phrase in arrival.cuda_starter(modules)


def test_cuda_is_up_where_torch_says_so():
    assert arrival.cuda_is_up({"torch": TORCH})
    assert not arrival.cuda_is_up({"torch": module("torch", cuda=SimpleNamespace(is_initialized=lambda: False))})


def test_a_process_looks_at_itself_in_plain_data():
    import json

    facts = arrival.look()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["host"]
    assert facts["host"] == arrival.host()


@pytest.mark.parametrize(
    ("environ", "known", "shared"),
    [
        ({}, None, False),
        ({"PYTEST_XDIST_WORKER_COUNT": "1"}, None, False),
        ({"PYTEST_XDIST_WORKER_COUNT": "4"}, None, True),
        ({"PYTEST_XDIST_WORKER_COUNT": "4", "PYTEST_VLLM_CLEANUP_SHARERS": "1"}, 1, False),
        ({"PYTEST_XDIST_WORKER_COUNT": "4", "PYTEST_VLLM_CLEANUP_SHARERS": "2"}, 2, True),
    ],
)
def test_a_device_is_shared_unless_it_was_given_to_one_worker(environ, known, shared):
    assert sharers(environ) == known
    assert is_shared(environ) == shared
