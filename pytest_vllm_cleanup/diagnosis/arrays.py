"""Arrays of numpy, which the garbage collector does not see, and the tensors whose memory they share or contain."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any

from pytest_vllm_cleanup.diagnosis import heap

_AT_ONCE = 1000  # objects whose referents are asked for at once
_DEEPEST = 4  # containers in containers that the collector does not see either, as they hold arrays alone
_MOST_BASES = 8
_MOST_ELEMENTS = 1_000_000  # of one array of objects
_clock = time.monotonic  # a test may have stopped it


def owners(wanted: Collection[int], deadline: float) -> Iterator[tuple[Any, Any]]:
    """Look for arrays that hold objects, and for what holds these arrays where the collector does not see it.

    Args:
        wanted: ids of the objects.
        deadline: when to stop, on the clock of ``time.monotonic``.

    Returns:
        pairs of owner and what is owned, from the objects on.
    """
    numpy = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)
    if array is None:
        return
    seen: set[int] = set()
    owning: set[int] = set()
    things = iter(gc.get_objects())
    while (batch := list(itertools.islice(things, _AT_ONCE))) and _clock() < deadline:
        found = _hidden(batch, array, seen)
        for thing in found:
            if type(thing) is array and (pairs := list(_of_array(thing, array, wanted))):
                owning.add(id(thing))
                yield from pairs
        for thing in reversed(found):  # from inside to outside
            held = [part for part in heap.referents(thing) if id(part) in owning]
            if held:
                owning.add(id(thing))
                yield from ((thing, part) for part in held)


def _hidden(things: list[Any], array: type[Any], seen: set[int]) -> list[Any]:
    """Return what some objects hold and the collector does not see: arrays, and containers, each once."""
    kinds = frozenset(map(id, (array, dict, tuple)))
    found: list[Any] = []
    for _ in range(_DEEPEST):
        parts = heap.referents_of_many(things)
        things = []
        # No loop of ours over all of them.
        for part in itertools.compress(parts, map(kinds.__contains__, map(id, map(type, parts)))):
            if id(part) not in seen and not gc.is_tracked(part):
                seen.add(id(part))
                things.append(part)
        if not things:
            break
        found += things
    return found


def _of_array(array: Any, kind: type[Any], wanted: Collection[int]) -> Iterator[tuple[Any, Any]]:
    """Iterate over what leads from an array to one of the objects."""
    links = [array]
    while type(links[-1]) is kind and links[-1].base is not None and len(links) < _MOST_BASES:
        links.append(links[-1].base)
    if id(links[-1]) in wanted:
        yield from itertools.pairwise(links)
    elif array.dtype.kind == "O" and array.size <= _MOST_ELEMENTS:
        yield from ((array, element) for element in array.flat if id(element) in wanted)
