"""Whose are the processes on a device, as far as two readings tell: ours, somebody else's, or not known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .expectation import CONTEXT_LIMIT
from .reading import ProcessUse, Reading
from .units import MIB, format_size

NEIGHBOUR = 256 * MIB
"""More than this, and not by us, is another process: less than a small context with its kernels, and more than
what the driver keeps for itself on an idle device."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one process held on a device before and after, in bytes; None where the driver does not say."""

    pid: int
    name: str | None
    before: int | None
    after: int | None

    def __str__(self) -> str:
        sizes = ("unknown" if size is None else format_size(size) for size in (self.before, self.after))
        return f"pid {self.pid} ({self.name or 'name not known here'}): {' -> '.join(sizes)}"

    @property
    def growth(self) -> int:
        """Bytes that it took meanwhile; 0 where that is not known."""
        return 0 if self.before is None or self.after is None else self.after - self.before


def changes(pids: Iterable[int], baseline: Reading, after: Reading) -> tuple[Change, ...]:
    """Return what some processes held before and after, most growth first; one that is not listed held nothing."""
    before, now = ({use.pid: use for use in reading.processes or ()} for reading in (baseline, after))
    found = []
    for pid in pids:
        uses = [uses[pid] for uses in (now, before) if pid in uses]
        name = next((use.name for use in uses if use.name), None)
        sizes = [uses[pid].bytes if pid in uses else 0 for uses in (before, now)]
        found.append(Change(pid, name, *sizes))
    return tuple(sorted(found, key=lambda change: (-change.growth, change.pid)))


def tells(reading: Reading) -> bool:
    """Whether a reading tells our processes from others."""
    return reading.own is not None or reading.children is not None or any(use.ours for use in reading.processes or ())


def beside_ours(reading: Reading) -> int | None:
    """Return what is in use on the device beside our processes; None if it cannot be had."""
    if reading.used is None or reading.own is None or reading.children is None:
        return None
    return reading.used - reading.own - reading.children


def why(reading: Reading) -> str:
    """Say why a reading does not tell our processes from others; empty if its list of processes does."""
    told = reading.own is not None and reading.children is not None
    if told and (reading.listed or not reading.absent):
        return ""
    if reading.processes is None:
        return "the driver does not list processes here"
    if not reading.processes:
        return "the driver lists no process here"
    if any(use.ours for use in reading.processes):
        return "the driver does not say how much each process holds"
    return "the driver lists no process of this one's process table"


def strangers(baseline: Reading, after: Reading) -> frozenset[int]:
    """Return the numbers of the processes that are surely not ours.

    They were listed when nothing of ours could be on the device, or when ours could be told from them; or there
    can be none of ours but this process, and that is another one.
    """
    readings = (baseline, after)
    ours = {use.pid for reading in readings for use in reading.processes or () if use.ours}
    theirs = {use.pid for reading in readings if tells(reading) for use in reading.processes or () if not use.ours}
    me = {pid for reading in readings if (pid := _this_process(reading, theirs)) is not None}
    if len(me) == 1:
        theirs.update(use.pid for r in readings if r.living == () and not tells(r) for use in r.processes or ())
    return frozenset(theirs - ours - me)


def _this_process(reading: Reading, theirs: set[int]) -> int | None:
    """Return the number that the driver has for this process, where only one can be it."""
    if tells(reading) or reading.living != () or reading.reserved is None:
        return None
    left = [use for use in reading.processes or () if use.pid not in theirs]
    # A list that leaves us out has only others, and these are seldom of the right size.
    return left[0].pid if len(left) == 1 and (left[0].bytes or 0) >= reading.reserved else None


@dataclass(frozen=True, slots=True)
class Tenants:
    """The processes on a device whose driver does not tell ours from others."""

    baseline: Reading
    after: Reading

    def held(self) -> tuple[int, int]:
        """Bytes that others surely held, before and after."""
        theirs = strangers(self.baseline, self.after)
        before, after = (
            sum(use.bytes or 0 for use in reading.processes or () if use.pid in theirs)
            for reading in (self.baseline, self.after)
        )
        return before, after

    def neighbours(self) -> tuple[Change, ...]:
        """Return what those held that are surely not ours."""
        return changes(strangers(self.baseline, self.after), self.baseline, self.after)

    def newcomers(self) -> tuple[ProcessUse, ...]:
        """Return our processes that live now and did not when the baseline was read."""
        if self.baseline.living is None or self.after.living is None:
            return ()
        before = {use.pid for use in self.baseline.living}
        return tuple(use for use in self.after.living if use.pid not in before)

    def doubt(self, floor: int) -> str:
        """Why the device is not known to be ours alone, as a phrase; empty where nothing speaks against that.

        Args:
            floor: What the device held at the baseline beside our allocator and known neighbours, in bytes.
        """
        if any(None in (change.before, change.after) for change in self.neighbours()):
            return "how much others hold is not told"
        if any(self._crowded(reading) for reading in (self.baseline, self.after)):
            return "more processes are listed than can be ours, and which are ours is not told"
        # Beside a context, an engine that lives on in this process may have CUDA graphs.
        explained = 2 * CONTEXT_LIMIT if self.baseline.context else NEIGHBOUR
        if self.baseline.living == () and floor > explained:
            return f"{format_size(floor)} were in use before that no process of ours can have held"
        return ""

    def hideable(self) -> int | None:
        """Bytes of ours that others may have made room for unseen, None if that can be any number."""
        sizes = [use.bytes for reading in (self.baseline, self.after) for use in reading.processes or ()]
        if not sizes or None in sizes or not any(self._crowded(r) for r in (self.baseline, self.after)):
            return None
        unknown = self._unknown(self.baseline) | self._unknown(self.after)
        return sum(max(0, -change.growth) for change in changes(unknown, self.baseline, self.after))

    def _unknown(self, reading: Reading) -> frozenset[int]:
        ours = {use.pid for use in reading.processes or () if use.ours}
        return frozenset(use.pid for use in reading.processes or ()) - strangers(self.baseline, self.after) - ours

    def _crowded(self, reading: Reading) -> bool:
        if reading.context is None or reading.living is None:
            return False
        return len(self._unknown(reading)) > len(reading.living) + reading.context
