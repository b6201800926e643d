"""Which worker gets which device. Pure decisions over numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def worker_count(devices: int, per_device: int) -> int:
    """Return how many workers a machine with so many devices runs. Raises ``ValueError`` for less than one of each."""
    if devices < 1 or per_device < 1:
        raise ValueError(f"{devices} devices with {per_device} workers each make no worker")
    return devices * per_device


def home(devices: Sequence[T], rank: int) -> T:
    """Return the device of a worker.

    Neighbouring workers get different devices, and each device gets as many workers as any other, or one more.

    Args:
        devices: what is shared out, at least one.
        rank: the worker's number among those that share it out, from 0.
    """
    return devices[rank % len(devices)]


def sharers(devices: int, rank: int, workers: int) -> int:
    """Return how many workers have the same device as one of them, itself included.

    Args:
        devices: how many devices are shared out.
        rank: the worker's number, from 0.
        workers: how many workers share them out.
    """
    place = rank % devices
    return max(1, (max(workers, rank + 1) - place + devices - 1) // devices)


def widened(devices: Sequence[T], rank: int, wanted: int) -> tuple[T, ...] | None:
    """Return what a worker gets for a test that needs several devices; None if there are not so many.

    Its own one first, and then those that follow in the list. Always the same for the same number: CUDA in the
    worker's process keeps the devices that it saw when it came up.
    """
    if wanted > len(devices):
        return None
    start = rank % len(devices)
    return tuple(devices[(start + step) % len(devices)] for step in range(wanted))
