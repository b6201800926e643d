from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from pytest_vllm_cleanup.memory.meters.torch_allocator import TorchAllocatorMeter

NOBODY = frozenset()


def test_without_torch_nothing_is_read_and_nothing_imported():
    meter = TorchAllocatorMeter()
    assert not meter.available()
    assert meter.read(NOBODY) == {}
    assert "torch" not in sys.modules


def test_before_cuda_is_up_no_counter_is_touched(fake_torch):
    torch = fake_torch({0: (1, 2)}, initialised=False)
    assert TorchAllocatorMeter().read(NOBODY) == {}
    assert torch.touched == []


def test_a_torch_that_is_being_imported_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert TorchAllocatorMeter().read(NOBODY) == {}


def test_devices_with_a_context_are_read_and_the_others_not_touched(fake_torch):
    torch = fake_torch({1: (5, 8)}, uuids=("a", "b", "c"))
    readings = TorchAllocatorMeter().read(NOBODY)
    assert list(readings) == ["cuda:1"]
    assert (readings["cuda:1"].allocated, readings["cuda:1"].reserved) == (5, 8)
    assert readings["cuda:1"].used is None
    assert set(torch.touched) == {1}


def test_zero_bytes_are_known_to_be_zero(fake_torch):
    fake_torch({0: (0, 0)})
    assert TorchAllocatorMeter().read(NOBODY)["cuda:0"].allocated == 0


def test_a_torch_that_cannot_tell_contexts_is_asked_for_its_reservation(fake_torch):
    torch = fake_torch({0: (5, 8), 1: (0, 0)}, uuids=("a", "b"))
    del torch._C._cuda_hasPrimaryContext
    assert list(TorchAllocatorMeter().read(NOBODY)) == ["cuda:0"]


def test_an_allocator_without_counters_is_unknown_and_said(fake_torch):
    torch = fake_torch({0: (5, 8)})
    torch.cuda.memory_reserved = lambda _ordinal: (_ for _ in ()).throw(RuntimeError("no getDeviceStats"))
    meter = TorchAllocatorMeter()
    assert meter.read(NOBODY) == {}
    assert "no getDeviceStats" in meter.reason


def test_the_room_imports_neither_torch_nor_vllm_nor_the_driver():
    code = (
        "import sys, pytest_vllm_cleanup.memory, pytest_vllm_cleanup.devices as d;"
        "print(sorted({'torch', 'vllm', 'pynvml', 'pytest'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_real_torch_is_read_without_starting_cuda():
    code = (
        "import torch; from pytest_vllm_cleanup.memory.meters.torch_allocator import *;"
        "names = 'is_initialized device_count get_device_properties memory_allocated memory_reserved';"
        "assert all(callable(getattr(torch.cuda, name)) for name in names.split());"
        "print(TorchAllocatorMeter().read(frozenset()), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{}", "False"]
