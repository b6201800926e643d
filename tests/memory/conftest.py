"""Stand-ins for torch, and for the driver of ``fake_nvml``, on machines without a GPU."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
from fake_nvml import FakeNvml, make_card

from pytest_vllm_cleanup.memory.meters import nvml, processes, torch_allocator


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
