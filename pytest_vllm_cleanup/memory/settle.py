"""Read again until memory is back, stuck, or out of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Sample = tuple[float, "int | None"]
Trend = Literal["back", "flat", "falling", "timeout"]

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.25
# Fewer equal reads can be one slow read on each side of a step.
_FLAT_READS = 4


@dataclass(frozen=True, slots=True)
class Settled(Generic[T]):
    """How waiting for memory ended.

    Attributes:
        value: The last thing read.
        waited: Seconds from the first read to the end of the last one.
        samples: ``(seconds since the start, bytes)`` of every read.
        trend: ``back``: the goal was reached. ``flat``: the figure stood still, so waiting longer is no use.
            ``falling``: time ran out while bytes were still coming back. ``timeout``: time ran out otherwise.
    """

    value: T
    waited: float
    samples: tuple[Sample, ...]
    trend: Trend

    @property
    def rate(self) -> float:
        """Bytes per second that came back from the highest sample to the last one; 0.0 if none did."""
        known = [(at, figure) for at, figure in self.samples if figure is not None]
        if not known:
            return 0.0
        last_at, last = known[-1]
        # The latest of equal peaks: the plateau before the fall is not part of it.
        peak_at, peak = max(known, key=lambda sample: (sample[1], sample[0]))
        return (peak - last) / (last_at - peak_at) if last_at > peak_at else 0.0

    @property
    def stood(self) -> float:
        """Seconds for which the last figure had not changed when waiting ended."""
        return _stood(self.samples)[0] if self.samples else 0.0


def settle(
    read: Callable[[], T],
    is_back: Callable[[T], bool],
    figure: Callable[[T], int | None],
    *,
    timeout: float,
    flat_after: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Settled[T]:
    """Read until ``is_back`` says so, until ``figure`` stands still, or until ``timeout``.

    The first read is made at once and, if memory is back, is the only one. After it the pauses grow from
    50 to 250 ms, and one last read is made when time is up.

    Args:
        read: Takes a reading.
        is_back: Whether a reading is good enough to stop.
        figure: The bytes in a reading that are hoped to fall; None where they cannot be had.
        timeout: Seconds to wait at most, the time inside ``read`` not cut short.
        flat_after: Seconds (and at least four reads) without any change after which the figure counts as
            stuck. Memory of an ending process comes back in one step, so this should exceed the time that
            such a process takes to end.
        clock: Seconds that only grow.
        sleep: Waits for so many seconds.
    """
    start = clock()
    samples: list[Sample] = []
    pause = _FIRST_PAUSE
    while True:
        value = read()
        waited = clock() - start
        samples.append((waited, figure(value)))
        if is_back(value):
            trend: Trend = "back"
        elif _is_flat(samples, flat_after):
            trend = "flat"
        elif waited >= timeout:
            trend = "falling" if _is_falling(samples, flat_after) else "timeout"
        else:
            sleep(min(pause, timeout - waited))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
            continue
        return Settled(value=value, waited=waited, samples=tuple(samples), trend=trend)


def _is_flat(samples: list[Sample], flat_after: float) -> bool:
    """Whether the newest figure has stood for ``flat_after`` seconds and over enough reads."""
    seconds, reads = _stood(samples)
    return reads >= _FLAT_READS and seconds >= flat_after


def _stood(samples: Sequence[Sample]) -> tuple[float, int]:
    """Return for how many seconds, and over how many reads, the newest figure has stood."""
    now, newest = samples[-1]
    reads, since = 0, now
    for at, figure in reversed(samples):
        if figure != newest:
            break
        reads, since = reads + 1, at
    return now - since, reads


def _is_falling(samples: list[Sample], window: float) -> bool:
    """Whether bytes came back within the last ``window`` seconds, and none of them were taken again."""
    now = samples[-1][0]
    # One sample from before the window: the fall that led into it counts.
    inside = sum(1 for at, _ in samples if at >= now - window)
    recent = [figure for _, figure in samples[-(inside + 1) :] if figure is not None]
    return len(recent) > 1 and recent[-1] < recent[0] and recent[-1] == min(recent)
