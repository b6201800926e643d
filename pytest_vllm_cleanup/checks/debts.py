"""Leaks of earlier tests, followed weakly: memory that comes back late hides no leak of the test that runs then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytest_vllm_cleanup.diagnosis.tensors import Inventory, StorageWatch
from pytest_vllm_cleanup.memory import HOST, Adjustment, DeviceVerdict
from pytest_vllm_cleanup.processes import proc

_IN_TENSORS = frozenset({"allocator", "host"})


@dataclass(frozen=True, eq=False)
class Debt:
    """What one leak holds on one device.

    Attributes:
        device: name of the device.
        figure: the figure of ``Adjustment`` in which it is counted.
        held: tells how many bytes it still holds.
    """

    device: str
    figure: str
    held: Callable[[], int]

    def adjustment(self, size: int) -> Adjustment:
        """Return so many bytes of this debt as a change of what is expected."""
        return Adjustment(**{self.figure: size})


def debts_of(device: DeviceVerdict, inventory: Inventory) -> list[Debt]:
    """Return what can be followed of a leak: its tensors, and its processes.

    Args:
        device: the verdict on one device.
        inventory: the tensors that were there before.
    """
    debts = []
    if device.reason in _IN_TENSORS:
        where = "cpu" if device.device == HOST else device.device
        watch = StorageWatch([storage for storage in inventory.new() if storage.device == where])
        debts.append(Debt(device.device, "host" if device.device == HOST else "allocated", watch.remaining))
    for change in device.processes:
        process = proc.identify(change.pid)
        if process is not None and device.reason == "processes":
            debts.append(Debt(device.device, "children", _while_running(process, change.growth)))
    return debts


def _while_running(process: proc.ProcessId, size: int) -> Callable[[], int]:
    return lambda: size if proc.is_running(process) else 0
