"""Sizes and durations as people write them, and back."""

from __future__ import annotations

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SIZES = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SECONDS = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
}
_QUANTITY = re.compile(r"\s*\+?(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: str | int) -> int:
    """Read a size in bytes.

    ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are powers of 1024, ``KB``, ``MB``, ``GB`` and ``TB`` powers of
    1000; upper and lower case are the same. A bare number is a number of bytes.

    Args:
        value: ``"4 GiB"``, ``"64 MiB"``, ``"1.5GB"``, ``"1048576"`` or an ``int``.

    Returns:
        Whole bytes, rounded.

    Raises:
        ValueError: The value is negative, or is not such a size. ``"4G"`` is refused: it would be 7 % more
            to one reader than to another.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value)):
        number, factor = found[1], _SIZES.get(found[2].lower())
        if factor is not None:
            # Whole numbers stay integers: a float is exact to 8 PiB only.
            size: int = int(number) * factor if number.isdigit() else round(float(number) * factor)
            return size
    raise ValueError(
        f"not a size: {value!r}. Write for example '4 GiB', '64 MiB', '1.5GB' or a whole number of bytes, zero or more."
    )


def format_size(size: int) -> str:
    """Write a number of bytes for people: ``"14.2 GiB"``, ``"64 MiB"``, ``"-512 B"``.

    Units are binary. A decimal is shown where the figure is rounded and left out where it is exact; below
    1 KiB the bytes are exact.
    """
    sign = "-" if size < 0 else ""
    size = abs(size)
    if size < KIB:
        return f"{sign}{size} B"
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        scale = 1024**power
        # The bound lies below the next unit, so that nothing is written as "1024.0 KiB".
        if size < scale * 1023.95 or unit == "TiB":
            break
    return f"{sign}{size // scale} {unit}" if size % scale == 0 else f"{sign}{size / scale:.1f} {unit}"


def parse_duration(value: str | float) -> float:
    """Read a duration in seconds.

    Args:
        value: ``"30s"``, ``"2 min"``, ``"500 ms"``, ``"1h"``, or a number of seconds.

    Raises:
        ValueError: The value is negative, not finite, or is not such a duration.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value) and value >= 0:
            return float(value)
    elif isinstance(value, str) and (found := _QUANTITY.fullmatch(value)):
        factor = _SECONDS.get(found[2].lower())
        if factor is not None:
            return float(found[1]) * factor
    raise ValueError(
        f"not a duration: {value!r}. Write for example '30s', '2 min', '500 ms' or a number of seconds, zero or more."
    )
