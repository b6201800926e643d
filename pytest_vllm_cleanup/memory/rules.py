"""The rules by which two readings of one device are compared.

The figures, from exact to coarse: torch's allocator in this process; our other processes on the device; this
process below its allocator; the whole device. Each rule knows what it cannot see, and then says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .expectation import Adjustment, Grants
from .reading import HOST, Reading
from .units import MIB

Outcome = Literal["released", "foreign", "unknown", "leaked"]

EXACT_TOLERANCE = MIB
"""Default for figures in which nothing moves by itself: the allocator, and ended processes."""

DEVICE_TOLERANCE = 64 * MIB
"""Default for the whole device, where the driver's own needs move. The context of a process that is left
behind takes several times as much (621 MiB on an H200)."""

HOST_TOLERANCE = 64 * MIB
"""Default for host memory, where every import and every fragmented heap page counts."""

_ALLOCATOR = "torch allocator"
_CACHE = "free blocks of the torch allocator"
_PROCESSES = "processes on the device"
_BELOW = "this process below its allocator"
_DEVICE = "device"
_OTHERS = "other processes on the device"
_HOST = "private host memory"
SEE_PROCESSES = frozenset({_PROCESSES, _DEVICE, _HOST})
"""Figures that also show what our other processes hold; an engine usually lives in one."""


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What is said of one device.

    Attributes:
        outcome: ``released``, ``leaked``, ``foreign`` (a process that is not ours grew) or ``unknown``.
        reason: For a leak the layer: ``allocator``, ``allocator cache``, ``processes``, ``below allocator``,
            ``device`` or ``host``. Otherwise a phrase; empty when released.
        device: Its name, as ``cuda:0``.
        meter: The figure that decided, in words; ``none`` if there was none.
        stayed: Bytes above the baseline and above what was expected; 0 if none or if no figure decided.
        baseline: The figure before, in bytes; 0 if no figure decided.
        after: The figure after, in bytes; 0 if no figure decided.
        tolerance: The bytes that were let pass.
    """

    outcome: Outcome
    reason: str
    device: str
    meter: str
    stayed: int
    baseline: int
    after: int
    tolerance: int


@dataclass(frozen=True, slots=True)
class Case:
    """Two readings and what is known about them. Each rule gives None where it does not apply."""

    baseline: Reading
    after: Reading
    tolerance: int | None
    expected: Adjustment
    grants: Grants

    def rules(self) -> Iterator[DeviceVerdict | None]:
        """Yield the verdict of each rule, most exact figure first."""
        if self.after.device == HOST:
            yield self.host()
            return
        yield self.allocator()
        yield self.cache()
        identities = {self.baseline.identity, self.after.identity} - {None}
        if len(identities) > 1:
            yield self.unknown("the two readings are of different devices")
            return
        yield self.processes()
        yield self.below()
        yield self.device() if self.device_decides() else self.strangers()

    def allocator(self) -> DeviceVerdict | None:
        """Judge the live tensors of this process. Where CUDA was not up there were none."""
        if self.after.allocated is None:
            lost = self.baseline.allocated is not None
            return self.unknown("torch's allocator could not be read any more") if lost else None
        before, working = self.baseline.allocated or 0, self.grants.working.allocated
        return self.compare(
            "allocator", _ALLOCATOR, before, self.after.allocated, self.expected.allocated, EXACT_TOLERANCE, working
        )

    def cache(self) -> DeviceVerdict | None:
        """Judge memory that the allocator cannot hand back though no tensor is in it, such as orphaned pools.

        An engine that lives on in this process keeps such memory by right (pools of its CUDA graphs).
        """
        if self.after.allocated is None or self.after.reserved is None or self.expected.allocated > 0:
            return None
        before = (self.baseline.reserved or 0) - (self.baseline.allocated or 0)
        after = self.after.reserved - self.after.allocated
        return self.compare("allocator cache", _CACHE, before, after, 0, EXACT_TOLERANCE, self.grants.overhead)

    def processes(self) -> DeviceVerdict | None:
        """Judge our other processes: of an engine that was stopped nothing may be left."""
        if self.baseline.children is None or self.after.children is None or self.nobody_listed():
            return None
        return self.compare(
            "processes",
            _PROCESSES,
            self.baseline.children,
            self.after.children,
            self.expected.children,
            EXACT_TOLERANCE,
            self.grants.working.children,
        )

    def below(self) -> DeviceVerdict | None:
        """Judge this process below its allocator: the context is granted once, growth per test within limits."""
        if not self.after.own or (self.baseline.own is None and self.baseline.reserved is not None):
            return None
        reserved = self.reserved()
        before, after = (self.baseline.own or 0) - reserved[0], self.after.own - reserved[1]
        first = not self.baseline.own or (self.baseline.reserved is None and self.after.reserved is not None)
        if not first:
            before = max(before, self.grants.known_context)
        allowed = self.grants.first_use if first else self.grants.overhead
        return self.compare("below allocator", _BELOW, before, after, self.expected.below, EXACT_TOLERANCE, allowed)

    def device(self) -> DeviceVerdict | None:
        """Judge the whole device, where nothing finer is known. What the allocator holds is judged by itself."""
        if self.baseline.used is None or self.after.used is None:
            return None
        if self.baseline.others or self.after.others:
            return self.unknown("other processes use the device, and our own cannot be told from them")
        # A sleeping engine keeps its reservation and not its memory; what comes back with it is no growth.
        floor = 0 if self.baseline.reserved is None else self.grants.known_context
        reserved = self.reserved()
        before, after = max(self.baseline.used - reserved[0], floor), self.after.used - reserved[1]
        allowed = self.grants.working.children
        if self.after.reserved is not None:
            allowed += self.grants.first_use if self.baseline.reserved is None else self.grants.overhead
        expected = self.expected.children + self.expected.below
        return self.compare("device", _DEVICE, before, after, expected, DEVICE_TOLERANCE, allowed)

    def strangers(self) -> DeviceVerdict | None:
        """Judge growth of the device that our processes do not explain; never a leak."""
        before, after = (_not_ours(reading) for reading in (self.baseline, self.after))
        if before is None or after is None:
            return None
        rest = self.compare("", _DEVICE, before, after, 0, DEVICE_TOLERANCE)
        if rest.outcome == "released":
            return None
        others = (self.baseline.others, self.after.others)
        if others[0] is None or others[1] is None:
            return self.unknown("the device grew, and what other processes hold cannot be read")
        grew = self.compare(
            "other processes grew", _OTHERS, others[0], others[1], 0, DEVICE_TOLERANCE, failing="foreign"
        )
        if grew.outcome == "foreign":
            return grew
        # Each context costs the driver a little that no process is charged for.
        if rest.stayed > max(rest.tolerance, self.grants.overhead):
            return self.unknown("the device grew, and no process that is listed on it did")
        return None

    def host(self) -> DeviceVerdict | None:
        """Judge host memory of this process and its children."""
        before, after = self.baseline.used, self.after.used
        if before is None or after is None:
            return None
        expected = self.expected.host + self.grants.host
        return self.compare("host", _HOST, before, after, expected, HOST_TOLERANCE, self.grants.working.host)

    def reserved(self) -> tuple[int, int]:
        """Return the allocator's share, before and after; of neither where it cannot be read any more."""
        return (0, 0) if self.after.reserved is None else (self.baseline.reserved or 0, self.after.reserved)

    def nobody_listed(self) -> bool:
        """Whether the driver names no process, so that its list says nothing about ours."""
        return self.baseline.processes == () and self.after.processes == ()

    def device_decides(self) -> bool:
        """Whether what our processes hold is not known, or is claimed by an empty list of processes."""
        readings = (self.baseline, self.after)
        hidden = any(reading.own is None or reading.children is None for reading in readings)
        return hidden or self.nobody_listed()

    def compare(
        self,
        reason: str,
        meter: str,
        before: int,
        after: int,
        expected: int,
        default: int,
        allowed: int = 0,
        failing: Outcome = "leaked",
    ) -> DeviceVerdict:
        """Whether a figure grew by more than what was expected and what is let pass."""
        limit = max(default if self.tolerance is None else self.tolerance, allowed)
        growth = after - before - expected
        grew = growth > limit
        return DeviceVerdict(
            outcome=failing if grew else "released",
            reason=reason if grew else "",
            device=self.after.device,
            meter=meter,
            stayed=max(0, growth),
            baseline=before,
            after=after,
            tolerance=limit,
        )

    def unknown(self, reason: str) -> DeviceVerdict:
        """Say nothing, which is not the same as released."""
        tolerance = DEVICE_TOLERANCE if self.tolerance is None else self.tolerance
        return DeviceVerdict("unknown", reason, self.after.device, "none", 0, 0, 0, tolerance)


def _not_ours(reading: Reading) -> int | None:
    """Return what is in use on the device beside our processes; None if it cannot be had."""
    if reading.used is None or reading.own is None or reading.children is None:
        return None
    return reading.used - reading.own - reading.children
