"""Devices as people name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def parse_devices(value: Any) -> tuple[str, ...]:
    """Read one or several devices.

    Args:
        value: ``0``, ``"1"``, ``"cuda:1"``, ``"host"``, or several of them. Numbers count visible devices.

    Returns:
        Names such as ``"cuda:0"``.

    Raises:
        ValueError: the value is empty, negative, or names no device.
    """
    several = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    names = []
    for device in several:
        if isinstance(device, bool) or not isinstance(device, (int, str)) or (isinstance(device, int) and device < 0):
            raise ValueError(f"not a device: {device!r}. Write for example 0, 'cuda:1', 'host', or a list of them.")
        names.append(f"cuda:{device}" if isinstance(device, int) or device.isdecimal() else device)
    if not names:
        raise ValueError("no device: name at least one, or leave it out for all visible ones.")
    return tuple(names)
