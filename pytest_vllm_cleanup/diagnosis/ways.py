"""Ways through what is known of who holds whom: objects are numbers here, and of each its holders are known."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

_ON = -2  # in place of what follows: go on from here
_OFTEN = 256  # steps between two looks at the clock
_clock = time.monotonic  # a test may have stopped it


def cheapest_first(
    targets: Iterable[int],
    holders: Sequence[Sequence[int]],
    price: Callable[[int], float],
    detour: Callable[[int], float],
    until: float,
) -> Iterator[tuple[int, dict[int, int]]]:
    """Iterate over all objects from which a target can be reached, cheapest first (Dijkstra's algorithm).

    The holders of an object are looked at when it is their turn, so that a tight knot of objects, in which all hold
    all, does not have to be untied for what is nearer.

    Args:
        targets: where all ways end.
        holders: of each object, who holds it.
        price: what it costs to go on from an object.
        detour: what it costs more to go by way of an object.
        until: when to stop, on the clock of ``time.monotonic``.

    Returns:
        pairs of an object, and of what follows on the way from each object so far, -1 from a target.
    """
    queue: list[tuple[float, int, int]] = [(0.0, target, -1) for target in targets]
    toward: dict[int, int] = {}
    while queue:
        cost, place, following = heapq.heappop(queue)
        if following == _ON:
            for holder in holders[place]:
                if holder not in toward:
                    heapq.heappush(queue, (cost + detour(holder), holder, place))
        elif place not in toward:
            toward[place] = following
            yield place, toward
            heapq.heappush(queue, (cost + price(place), place, _ON))
            if len(toward) % _OFTEN == 0 and _clock() >= until:
                return


def reached(targets: Iterable[int], holders: Sequence[Sequence[int]], until: float) -> set[int]:
    """Return all objects from which a target can be reached; those that are found until then."""
    found = set(targets)
    waiting = list(found)
    steps = 0
    while waiting:
        new = set(holders[waiting.pop()]) - found
        found |= new
        waiting += new
        steps += 1
        if steps % _OFTEN == 0 and _clock() >= until:
            break
    return found


def path(place: int, toward: dict[int, int]) -> list[int]:
    """Return the way from an object to a target."""
    found = []
    while place >= 0:
        found.append(place)
        place = toward[place]
    return found
