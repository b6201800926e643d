"""Stand-ins for the driver and for torch on machines without a GPU."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from pytest_vllm_cleanup.memory.meters import nvml, processes, torch_allocator

GIB = 1 << 30


class FakeNvml:
    """The part of the module ``pynvml`` that the meter uses, over a table of devices."""

    nvmlMemory_v2 = 0x02000028

    class NVMLError(Exception):
        """Base of the library's errors."""

    class NVMLError_Uninitialized(NVMLError):
        """Not initialised in this process, or shut down."""

    class NVMLError_NoPermission(NVMLError):
        """Refused."""

    class NVMLError_NotSupported(NVMLError):
        """This device has no such figure."""

    def __init__(self, *cards):
        self.cards = cards
        self.inits = 0
        self.up = False
        self.calls = []
        self.hang = None

    def nvmlInit(self):
        if self.hang is not None:
            self.hang.wait(30)
        self.inits += 1
        self.up = True

    def _checked(self):
        if not self.up:
            raise self.NVMLError_Uninitialized("Uninitialized")

    def nvmlDeviceGetCount(self):
        self._checked()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._checked()
        for card in self.cards:
            for device in (card, *card.instances):
                if device.uuid == uuid:
                    return device
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, device):
        return device.uuid

    def nvmlDeviceGetName(self, device):
        return device.model

    def nvmlDeviceGetMigMode(self, device):
        return [int(bool(device.instances)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, _device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index >= len(device.instances):
            raise self.NVMLError("Not Found")
        return device.instances[index]

    def nvmlDeviceGetMemoryInfo(self, device, version=None):
        self.calls.append(("memory", version))
        if device.memory_error is not None:
            raise device.memory_error
        if version is not None and not device.second_version:
            raise self.NVMLError_NotSupported("Not Supported")
        # The first version counts what the driver reserves as used.
        return SimpleNamespace(used=device.used + (0 if version else 900 << 20), total=device.total)

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        if device.list_error is not None:
            raise device.list_error
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in device.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device):
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in device.graphics]


def make_card(uuid="GPU-aaaa0000", **values):
    fields = {
        "uuid": uuid,
        "model": "NVIDIA H200",
        "used": 0,
        "total": 140 * GIB,
        "compute": (),
        "graphics": (),
        "instances": (),
        "second_version": True,
        "memory_error": None,
        "list_error": None,
    }
    return SimpleNamespace(**{**fields, **values})


class FakeTorch:
    """The counters of torch's allocator: ``{ordinal: (allocated, reserved)}`` for devices with a context."""

    def __init__(self, devices, uuids=("aaaa0000",), initialised=True):
        self.devices = devices
        self.touched = []
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda ordinal: ordinal in devices)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: initialised,
            device_count=lambda: len(uuids),
            get_device_properties=lambda ordinal: SimpleNamespace(uuid=uuids[ordinal]),
            memory_allocated=lambda ordinal: self._counter(ordinal, 0),
            memory_reserved=lambda ordinal: self._counter(ordinal, 1),
        )

    def _counter(self, ordinal, which):
        self.touched.append(ordinal)
        return self.devices[ordinal][which]


@pytest.fixture
def fake_nvml():
    """Makes a stand-in for ``pynvml`` out of cards."""
    return FakeNvml


@pytest.fixture
def card():
    """Makes a card for the stand-in."""
    return make_card


@pytest.fixture
def fake_torch(monkeypatch):
    """Puts a stand-in for torch where the meters look for it."""

    def install(*args, **kwargs):
        torch = FakeTorch(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    return install


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    # Another test of the same run may have imported the real one.
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def driver_users(monkeypatch):
    """Which processes use the driver: numbers that a test may add to."""
    users = {os.getpid()}
    for module in (nvml, processes):
        monkeypatch.setattr(module, "uses_driver", users.__contains__)
    monkeypatch.setattr(torch_allocator, "holds_context", lambda: os.getpid() in users)
    return users


@pytest.fixture
def stuck():
    """An event on which a stand-in hangs, set when the test is over."""
    event = threading.Event()
    yield event
    event.set()
