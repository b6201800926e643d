"""A machine with two GPUs whose figures are what a test says. Inner test runs load it as a plugin."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import replace

from pytest_vllm_cleanup.engines import measure
from pytest_vllm_cleanup.memory import Gauge, ProcessUse, Reading

MIB = 1 << 20
TOTAL = 80 << 30


class Device:
    """One GPU. Figures are in bytes and may be changed at will."""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.context = 600 * MIB
        self.allocated = 0
        self.cached = 0
        self.children = 0
        self.others = 0
        self.unlisted = 0  # in use, and nobody is listed for it
        self.hidden = False  # whether the driver lists the processes with the numbers of another table
        self.readable = True
        self._later = []

    def later(self, seconds, figure, change):
        """Change a figure at the first reading after so many seconds."""
        self._later.append((time.monotonic() + seconds, figure, change))

    def reading(self):
        now = time.monotonic()
        for due in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(due)
            _, figure, change = due
            setattr(self, figure, getattr(self, figure) + change)
        reserved = self.allocated + self.cached
        own = self.context + reserved
        processes = [ProcessUse(os.getpid(), own, "python", ours=True)] if own else []
        if self.children:
            processes.append(ProcessUse(4242, self.children, "VLLM::EngineCore", ours=True))
        living = tuple(replace(use, bytes=None) for use in processes if use.pid == 4242)
        if self.others:
            processes.append(ProcessUse(777, self.others, "stranger", ours=False))
        reading = Reading(
            device=self.name,
            meters=("fake",),
            used=own + self.children + self.others + self.unlisted,
            total=TOTAL,
            own=own,
            children=self.children,
            others=self.others,
            allocated=self.allocated if own else None,
            reserved=reserved if own else None,
            processes=tuple(processes),
            listed=not self.hidden,
            context=bool(own),
            living=living,
        )
        if not self.hidden:
            return reading
        listed = tuple(ProcessUse(use.pid + 3_000_000 * use.ours, use.bytes, None, ours=False) for use in processes)
        if reading.absent:
            return replace(reading, processes=listed)
        return replace(reading, own=None, children=None, others=None, processes=listed)


class Tensor:
    """Takes device memory until it is collected."""

    def __init__(self, size=2 * MIB, device=None):
        device = gpu if device is None else device
        device.allocated += size
        weakref.finalize(self, Tensor._free, device, size).atexit = False

    @staticmethod
    def _free(device, size):
        device.allocated -= size


class FakeMeter:
    name = "fake"
    reason = ""
    reads = 0

    def available(self):
        return True

    def read(self, ours):
        FakeMeter.reads += 1
        found = {device.name: device.reading() for device in (gpu, second_gpu) if device.readable}
        self.reason = "" if found else "the fake GPUs are switched off"
        return found


gpu = Device("cuda:0")
second_gpu = Device("cuda:1")


def pytest_configure():
    measure._gauges[os.getpid()] = Gauge([FakeMeter()], measure.our_processes)
