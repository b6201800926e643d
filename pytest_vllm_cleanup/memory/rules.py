"""The rules by which two readings of one device are compared.

The figures, from exact to coarse: torch's allocator in this process; our other processes on the device; this
process below its allocator; the whole device. Each rule knows what it cannot see, and then says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .expectation import Adjustment, Grants
from .reading import HOST, Reading
from .tenants import NEIGHBOUR, Change, Tenants, beside_ours, changes, why
from .units import MIB, format_size

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
_ADVICE = "give these tests a device of their own, or this container the process table of its host (docker: --pid=host)"
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
        why: Why the device as a whole was judged, as a sentence; empty where our processes were told from others.
        processes: Those that decided: ours that hold more than before, or for ``foreign`` those of others.
    """

    outcome: Outcome
    reason: str
    device: str
    meter: str
    stayed: int
    baseline: int
    after: int
    tolerance: int
    why: str = ""
    processes: tuple[Change, ...] = ()

    @property
    def may_come_back(self) -> bool:
        """Whether bytes are missing that can be those of a process which has just ended, and are worth a wait."""
        return self.outcome == "leaked" or (self.outcome != "released" and self.meter == _DEVICE and self.stayed > 0)


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
        told = all(reading.own is not None and reading.children is not None for reading in (self.baseline, self.after))
        shared = self.baseline.shared or self.after.shared
        if self.after.absent:
            yield self.absent()
        elif told:
            yield self.neighbours_grew() if shared else self.strangers()
        elif shared:
            hidden = why(self.after) or why(self.baseline) or "the driver does not tell ours from theirs"
            yield self.unknown(f"other workers of this run use the device too, and {hidden}; {_ADVICE}")
        else:
            yield self.device()

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
        if self.after.children is None:
            return None
        ours = {use.pid for use in self.after.processes or () if use.ours}
        before, expected = self.baseline.children, self.expected.children
        if before is None and self.baseline.processes is not None and self.after.listed:
            # Their numbers are known only now, and those of engines that have left never will be.
            before = sum(change.before or 0 for change in changes(ours, self.baseline, self.after))
            expected = max(0, expected)
        if before is None:
            return None
        working = self.grants.working.children
        verdict = self.compare("processes", _PROCESSES, before, self.after.children, expected, EXACT_TOLERANCE, working)
        grown = (change for change in changes(ours, self.baseline, self.after) if change.growth > 0)
        return replace(verdict, processes=tuple(grown) if verdict.outcome == "leaked" else ())

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

    def absent(self) -> DeviceVerdict | None:
        """Judge a device on which nothing can be ours any more: what has grown there is not ours."""
        if self.baseline.used is None or self.after.used is None:
            return None
        expected = self.expected.children + self.expected.below
        verdict = self.compare(
            "nothing of ours is on the device, and it grew",
            _DEVICE,
            self.baseline.used,
            self.after.used,
            expected,
            DEVICE_TOLERANCE,
            failing="foreign",
        )
        if verdict.outcome == "released":
            return verdict
        grew = self.neighbours_grew()
        explained = grew is not None and verdict.stayed - grew.stayed <= grew.tolerance
        return grew if grew is not None and explained else replace(verdict, why=why(self.after))

    def device(self) -> DeviceVerdict | None:
        """Judge the device beside torch's allocator and known neighbours, where ours cannot be told from others."""
        if self.baseline.used is None or self.after.used is None:
            return None
        tenants = Tenants(self.baseline, self.after)
        reserved, theirs = self.reserved(), tenants.held()
        floor = self.baseline.used - reserved[0] - theirs[0]
        # A sleeping engine keeps its reservation and not its memory; what comes back with it is no growth.
        before = max(floor, 0 if self.baseline.reserved is None else self.grants.known_context)
        after = self.after.used - reserved[1] - theirs[1]
        allowed = self.grants.working.children
        if self.after.reserved is not None:
            allowed += self.grants.first_use if self.baseline.reserved is None else self.grants.overhead
        expected = self.expected.children + self.expected.below
        verdict = self.compare("device", _DEVICE, before, after, expected, DEVICE_TOLERANCE, allowed)
        doubt = tenants.doubt(floor)
        verdict = replace(verdict, why=", and ".join(filter(None, (why(self.after) or why(self.baseline), doubt))))
        # One of ours that should not be there, and is, beside memory that should not be taken, and is: no doubt.
        orphans = tenants.newcomers() if self.expected.children <= 0 else ()
        if verdict.outcome == "leaked":
            if doubt and not orphans:
                grew = f"the device grew by {format_size(verdict.stayed)}"
                return self.unknown(f"{grew}, and {doubt}; {_ADVICE}", verdict)
            return replace(verdict, processes=tuple(Change(use.pid, use.name, 0, None) for use in orphans))
        hideable = tenants.hideable()
        back = max(0, reserved[0] - reserved[1]) + max(0, -expected)
        if doubt and (hideable is None or hideable - back > verdict.tolerance):
            return self.unknown(f"{doubt}, so that a leak may be hidden; {_ADVICE}")
        return self.neighbours_grew() or verdict

    def strangers(self) -> DeviceVerdict | None:
        """Judge growth of the device that our processes do not explain; never a leak."""
        before, after = (beside_ours(reading) for reading in (self.baseline, self.after))
        if before is None or after is None:
            return None
        rest = self.compare("", _DEVICE, before, after, 0, DEVICE_TOLERANCE, failing="unknown")
        others = (self.baseline.others, self.after.others)
        if others[0] is None or others[1] is None:
            reason = f"the device grew, and what other processes hold cannot be read; {_ADVICE}"
            return None if rest.outcome == "released" else self.unknown(reason, rest)
        # Each context costs the driver a little that no process is charged for.
        unlisted = self.compare(
            "", _DEVICE, before - others[0], after - others[1], 0, DEVICE_TOLERANCE, self.grants.overhead, "unknown"
        )
        if unlisted.outcome == "released":
            return self.neighbours_grew()
        if before - others[0] > NEIGHBOUR:
            return replace(unlisted, outcome="foreign", reason="processes that are not listed here grew")
        grew = f"the device grew by {format_size(unlisted.stayed)}"
        return self.unknown(f"{grew}, and no process that is listed on it did; {_ADVICE}", unlisted)

    def neighbours_grew(self) -> DeviceVerdict | None:
        """Return that others took more, with their names; None if those that are known did not."""
        tenants = Tenants(self.baseline, self.after)
        before, after = tenants.held()
        grew = self.compare("other processes grew", _OTHERS, before, after, 0, DEVICE_TOLERANCE, failing="foreign")
        if grew.outcome == "released":
            return None
        named = tuple(change for change in tenants.neighbours() if change.growth > 0)
        return replace(grew, processes=named, why=why(self.after) or why(self.baseline))

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

    def unknown(self, reason: str, grown: DeviceVerdict | None = None) -> DeviceVerdict:
        """Say nothing, which is not the same as released; with the figure that asked the question, if there is one."""
        if grown is not None:
            return replace(grown, outcome="unknown", reason=reason)
        tolerance = DEVICE_TOLERANCE if self.tolerance is None else self.tolerance
        return DeviceVerdict("unknown", reason, self.after.device, "none", 0, 0, 0, tolerance)
