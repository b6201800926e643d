"""Leaks that stay: what they still hold, and which engine cannot start because of them. Pure decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from pytest_vllm_cleanup.memory import Adjustment, DeviceVerdict, Reading, Snapshot, format_size

_NOTHING = Adjustment()
_NOT_GROWN: Mapping[str, int] = MappingProxyType({})
Expected = Callable[[frozenset[int]], Mapping[str, Adjustment]]
"""Tells by how much figures may differ, device by device, since such engines and fixtures were open."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that a test or fixture has taken for good.

    Attributes:
        owner: who leaked, in words: "test tests/test_a.py::test_x", or a fixture of wider scope.
        nodeid: the test that was running when it was noticed.
        device: where, as "cuda:0".
        bytes: how much of it is still missing.
        holder: who holds it, as named by the diagnosis; "" if nobody was found.
        reason: the layer: "allocator", "allocator cache", "processes", "below allocator", "device" or "host".
    """

    owner: str
    nodeid: str
    device: str
    bytes: int
    holder: str
    reason: str

    def __str__(self) -> str:
        held = f", held by {self.holder}" if self.holder else ""
        return f"{self.owner} left {format_size(self.bytes)} on {self.device}{held}"


@dataclass(eq=False, slots=True)
class Outstanding:
    """A leak that has not come back.

    Attributes:
        leak: the leak; its ``bytes`` are what it holds now, as far as is known, and never grow.
        baseline: the figure of that layer without the leak, in bytes.
        tolerance: bytes that count as nothing.
        live: the engines and fixtures that were open when ``baseline`` was right.
        identity: the driver's name of the device, which outlives its ordinal.
        held: tells how many bytes the leaked objects hold, None where they cannot be followed one by one.
    """

    leak: Leak
    baseline: int
    tolerance: int
    live: frozenset[int] = frozenset()
    identity: str | None = None
    held: Callable[[], int] | None = None

    @property
    def left(self) -> int:
        """Bytes that it holds now."""
        return self.leak.bytes

    def shrink(self, size: int) -> None:
        """Note that so many bytes have come back."""
        self.leak = replace(self.leak, bytes=self.leak.bytes - size)

    def reading(self, snapshot: Snapshot) -> Reading | None:
        """Return the reading of its device, whatever that is called now."""
        if self.identity is not None:
            return next((reading for reading in snapshot.values() if reading.identity == self.identity), None)
        return snapshot.get(self.leak.device)


class Quarantine:
    """The leaks of this process that have not come back, oldest first."""

    def __init__(self) -> None:
        self.outstanding: list[Outstanding] = []

    def add(self, outstanding: Outstanding) -> None:
        """Take in a leak, unless it is small enough to count as nothing."""
        if outstanding.left > outstanding.tolerance:
            self.outstanding.append(outstanding)

    def review(self, snapshot: Snapshot, expected: Expected) -> None:
        """Forget what has come back.

        Args:
            snapshot: readings of now.
            expected: what engines and fixtures that came or left since have changed.
        """
        by_figure = sorted(self.outstanding, key=lambda entry: (entry.leak.device, entry.leak.reason))  # stable
        for _, group in groupby(by_figure, key=lambda entry: (entry.leak.device, entry.leak.reason)):
            _review(list(group), snapshot, expected)
        self.outstanding = [entry for entry in self.outstanding if entry.left > entry.tolerance]

    def refusal(
        self, need: Mapping[str, float], snapshot: Snapshot, grown: Mapping[str, int] = _NOT_GROWN
    ) -> str | None:
        """Return why an engine cannot start, None if it can, or if leaks are not what stands in its way.

        Args:
            need: the share of each device that the engine asks for, by the device's name.
            snapshot: readings of now, after a review.
            grown: by how many bytes each device has grown since the running test began. So much of a leak that cannot
                be followed object by object may have come back and be the test's own memory now.
        """
        blamed: list[str] = []
        for device, share in need.items():
            reading = snapshot.get(device)
            if reading is None or reading.total is None or reading.used is None:
                continue
            asked, free = round(reading.total * share), reading.total - reading.used
            if asked <= free:
                continue
            entries = self._on(device, snapshot)
            sure = sum(entry.left for entry in entries if entry.held is not None)
            perhaps = sum(entry.left for entry in entries if entry.held is None)
            if asked > free + sure + max(0, perhaps - grown.get(device, 0)):
                return None
            blamed.append(
                f"{device} has {format_size(free)} of {format_size(reading.total)} free, and this engine asks for "
                f"{format_size(asked)} (gpu_memory_utilization {share:g}). "
                f"In its way: {'; '.join(str(entry.leak) for entry in entries)}."
            )
        return f"{' '.join(blamed)} {_ADVICE}" if blamed else None

    def notes(self) -> list[str]:
        """Return one sentence for each leak that is still there."""
        return [f"still there from an earlier leak: {entry.leak}" for entry in self.outstanding]

    def _on(self, device: str, snapshot: Snapshot) -> list[Outstanding]:
        found = []
        for entry in self.outstanding:
            reading = entry.reading(snapshot)
            if (entry.leak.device if reading is None else reading.device) == device:
                found.append(entry)
        return found


def farewell(leak: Leak) -> str:
    """Return why a run ends at a leak, in one sentence."""
    return f"{leak} (--vllm-cleanup-on-leak=exit)"


_ADVICE = "Mend that leak first; with --vllm-cleanup-on-leak=fail engines are let try all the same."


def outstanding_of(
    device: DeviceVerdict, reading: Reading, leak: Leak, live: frozenset[int], held: Iterable[Callable[[], int]] = ()
) -> Outstanding:
    """Return a leak as something to keep an eye on.

    Args:
        device: the verdict on its device.
        reading: the device now.
        leak: the leak.
        live: the engines and fixtures that were open then.
        held: what tells how much its objects hold; ignored where that does not add up to the leak.
    """
    followed = tuple(held)
    known = sum(tell() for tell in followed)
    rest = max(0, leak.bytes - known)
    # Memory that no object explains (graphs of autograd, C++ code) can only be followed in the figure.
    sure = bool(followed) and rest <= device.tolerance
    # The verdict on a whole device leaves neighbours out of its figures, which only two readings tell.
    figure = figure_of(leak.reason, reading) if leak.reason == "device" else None
    return Outstanding(
        leak=leak,
        baseline=(device.after if figure is None else figure) - leak.bytes,
        tolerance=device.tolerance,
        live=live,
        identity=reading.identity,
        held=(lambda: sum(tell() for tell in followed) + rest) if sure else None,
    )


def figure_of(reason: str, reading: Reading) -> int | None:
    """Return the figure in which a leak of this layer shows, in bytes; None where it cannot be had."""
    whole, part = {
        "allocator": (reading.allocated, 0),
        "allocator cache": (reading.reserved, reading.allocated),
        "processes": (reading.children, 0),
        "below allocator": (reading.own, reading.reserved or 0),
        "host": (reading.used, 0),
    }.get(reason, (reading.used, reading.reserved or 0))
    return None if whole is None or part is None else whole - part


def _review(entries: list[Outstanding], snapshot: Snapshot, expected: Expected) -> None:
    """Shrink the leaks of one figure, oldest first, to what they can still hold."""
    for entry in entries:
        if entry.held is not None:
            _take_off(entries, entry, entry.left - entry.held())
    rest = [entry for entry in entries if entry.held is None]
    if not rest:
        return
    newest = rest[-1]
    reading = newest.reading(snapshot)
    figure = None if reading is None else figure_of(newest.leak.reason, reading)
    if reading is None or figure is None:
        return  # what cannot be read has not come back
    changed = _change(newest.leak.reason, expected(newest.live).get(reading.device, _NOTHING))
    back = newest.left - (figure - newest.baseline - changed)
    # Memory comes back in one step: of several leaks it is the one of that size, else the last that came.
    exact = [entry for entry in reversed(rest) if abs(entry.left - back) <= entry.tolerance]
    for entry in exact[:1] or reversed(rest):
        size = min(entry.left, back)
        _take_off(entries, entry, size)
        back -= size


def _take_off(entries: list[Outstanding], entry: Outstanding, size: int) -> None:
    if size <= 0:
        return
    entry.shrink(min(size, entry.left))
    for later in entries[entries.index(entry) + 1 :]:
        later.baseline -= size  # it was measured with the earlier leak in it


def _change(reason: str, adjustment: Adjustment) -> int:
    """Return what is expected to have changed in the figure of a layer."""
    if reason == "device":
        return adjustment.children + adjustment.below
    figures = {"allocator": "allocated", "processes": "children", "below allocator": "below", "host": "host"}
    return int(getattr(adjustment, figures[reason])) if reason in figures else 0
