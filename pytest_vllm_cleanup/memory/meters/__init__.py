"""Meters: what takes readings."""

from __future__ import annotations

from typing import Protocol

from ..reading import Reading


class Meter(Protocol):
    """Takes partial readings: a meter fills the figures that it can have and leaves the others None."""

    @property
    def name(self) -> str:
        """A short name for reports."""
        ...

    @property
    def reason(self) -> str:
        """Why the meter cannot measure, as a phrase; empty while it can."""
        ...

    def available(self) -> bool:
        """Whether there is anything that it could read now."""
        ...

    def read(self, ours: frozenset[int]) -> dict[str, Reading]:
        """Read every device, by device name; never raises.

        Args:
            ours: Process ids of our other processes (descendants and registered ones).
        """
        ...
