"""Leaks of earlier tests, followed weakly: memory that comes back late hides no leak of the test that runs then.

A debt may be too small, which at worst hides a leak. It must not be too big: what did not take memory and seems to have
come back would be charged to the test that runs then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pytest_vllm_cleanup.diagnosis.tensors import Inventory, StorageWatch
from pytest_vllm_cleanup.memory import HOST, Adjustment, DeviceVerdict
from pytest_vllm_cleanup.processes import proc

_IN_TENSORS = frozenset({"allocator", "host"})
_TIME = 1.0  # seconds for each look
_clock = time.monotonic  # a test may have stopped it


@dataclass(frozen=True, eq=False)
class Debt:
    """What one leak holds on one device.

    Attributes:
        device: name of the device.
        figure: the figure of ``Adjustment`` in which it is counted.
        held: tells how many bytes it still holds.
        watch: the storages that are followed for it, None where it is a process.
    """

    device: str
    figure: str
    held: Callable[[], int]
    watch: StorageWatch | None = None

    def adjustment(self, size: int) -> Adjustment:
        """Return so many bytes of this debt as a change of what is expected."""
        return Adjustment(**{self.figure: size})

    def overlaps(self, other: Debt) -> bool:
        """Whether both follow the same memory."""
        if self.watch is None or other.watch is None:
            return False
        return not self.watch.parts().isdisjoint(other.watch.parts())


def debts_of(device: DeviceVerdict, inventory: Inventory) -> list[Debt]:
    """Return what can be followed of a leak: its tensors, and its processes.

    Args:
        device: the verdict on one device.
        inventory: the tensors that were there before.
    """
    debts = []
    if device.reason in _IN_TENSORS and (watch := _watch(device, inventory)) is not None:
        figure = "host" if device.device == HOST else "allocated"
        debts.append(Debt(device.device, figure, lambda: min(watch.remaining(), device.stayed), watch))
    for change in device.processes:
        process = proc.identify(change.pid)
        if process is not None and device.reason == "processes":
            debts.append(Debt(device.device, "children", _while_running(process, change.growth)))
    return debts


def _watch(device: DeviceVerdict, inventory: Inventory) -> StorageWatch | None:
    watch = StorageWatch(inventory.new_on(device.device, _clock() + _TIME), _clock() + _TIME)
    # Not all of a storage need be in memory: pages that were never written are not, and those of a file do not count.
    if device.device == HOST and abs(watch.remaining() - device.stayed) > device.tolerance:
        return None
    return watch


def _while_running(process: proc.ProcessId, size: int) -> Callable[[], int]:
    return lambda: size if proc.is_running(process) else 0
