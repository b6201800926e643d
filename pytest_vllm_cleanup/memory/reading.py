"""What a meter says: bytes at one moment on one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

HOST = "host"
"""The name of the one device that is no accelerator: this machine's memory, for vLLM's CPU platform."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process on a device.

    Attributes:
        pid: As the meter reports it; inside a container this may be a process id of the host.
        bytes: What it holds on the device, or None where the driver does not say.
        name: Its name, or None where it cannot be had.
        ours: True for this process, its descendants and the processes registered with the gauge.
    """

    pid: int
    bytes: int | None
    name: str | None
    ours: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes on one device. None means that a figure cannot be had; an unknown figure is never 0.

    Attributes:
        device: The caller's name of it: ``"cuda:0"`` counts visible devices only, or ``"host"``.
        meters: Names of the meters that contributed.
        used: All bytes in use on the device. On the host: own and children together.
        total: The size of the device.
        own: Held by this process, as the driver counts it (context, kernels, allocator). On the host: the
            memory that ending the process would give back.
        children: The same for our other processes: descendants and registered ones.
        others: Held by processes that are not ours.
        allocated: Live tensors in this process, by torch's caching allocator.
        reserved: What that allocator took from the driver.
        processes: Who is on the device, where that can be had.
        listed: Whether the numbers in ``processes`` are known to be those of our own process table. In a container
            they can be the host's, or our processes may not be listed at all.
        context: Whether this process may have a CUDA context on the device; False only where that is certain.
        living: Our other processes that live and may have a context on some device, by our own process table, so
            that they are known where the driver hides them. Their bytes are None.
        identity: The driver's unique name (UUID) of the device. An ordinal can change its device when CUDA
            comes up, since CUDA orders devices by speed and the driver's library by bus address.
        shared: Whether other workers of the same test run may use the device too.
    """

    device: str
    meters: tuple[str, ...] = ()
    used: int | None = None
    total: int | None = None
    own: int | None = None
    children: int | None = None
    others: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    processes: tuple[ProcessUse, ...] | None = None
    listed: bool | None = None
    context: bool | None = None
    living: tuple[ProcessUse, ...] | None = None
    identity: str | None = None
    shared: bool | None = None

    @property
    def absent(self) -> bool:
        """Whether nothing that is in use on the device can be ours."""
        return self.context is False and self.living == ()


Snapshot = dict[str, Reading]
"""Readings of one moment by device name."""

_FIGURES = tuple(field.name for field in fields(Reading) if field.name not in ("device", "meters"))


def merge(parts: Iterable[Reading]) -> Reading:
    """One reading out of partial ones of the same device; of two meters with the same figure the first wins.

    Raises:
        ValueError: No part, or parts of different devices.
    """
    parts = tuple(parts)
    if len({part.device for part in parts}) != 1:
        raise ValueError(f"cannot merge readings of {[part.device for part in parts]}: not one device")
    figures = {
        name: next((value for part in parts if (value := getattr(part, name)) is not None), None) for name in _FIGURES
    }
    names = tuple(dict.fromkeys(name for part in parts for name in part.meters))
    return Reading(device=parts[0].device, meters=names, **figures)
