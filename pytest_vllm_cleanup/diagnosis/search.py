"""The search from objects to who refers to them, level by level, until roots are found.

Each level is one walk of the garbage collector over all objects of the process, which is what it costs. So all
targets are searched for together, and what one of them has in common with another is walked once.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_vllm_cleanup.diagnosis import arrays, graphs, heap, places, safely, unseen, ways
from pytest_vllm_cleanup.diagnosis.callables import GENERATORS, generator_code
from pytest_vllm_cleanup.diagnosis.ranks import LIBRARY, UNKNOWN
from pytest_vllm_cleanup.diagnosis.roots import Root, Roots

_BATCH = 32  # objects whose referrers are asked for at once: each makes the walk slower
_MOST_OBJECTS = 20_000
_MOST_REFERRERS = 500  # of one object: who has more is shared by many, and hardly one of them owns it
_FEW_REFERRERS = 8
_MOST_ROOTS = 8  # of one kind and rank that refer to one object: as all tests of a parametrised one to its function
_MOST_NAMED = 200  # roots of one group
_WALKING = 0.9  # of the time, the rest is for naming
_DETOUR = 2.0
_SELDOM = 10.0  # times as long as it takes, until ranks are looked up again
_clock = time.monotonic  # a test may have stopped it


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What is known of a root that refers to one of the objects.

    Attributes:
        rank: see ``Chain``.
        kind: what kind of root it is.
        root: its place among the objects.
        variable: it, if it is none of the heap.
    """

    rank: int
    kind: str = ""
    root: int = -1
    variable: unseen.Variable | None = None


class Search:
    """Goes from targets to who holds them, cheapest first.

    A step costs more the more objects refer to the same thing: a configuration that all share explains little.

    Args:
        groups: the targets; those of one group are one thing for a person, as the tensors of one storage are.
        deadline: when to stop, on the clock of ``time.monotonic``.
        ignored: ids of objects that are not followed.
        base: the folder to which paths are relative.
    """

    def __init__(self, groups: Sequence[Iterable[Any]], deadline: float, ignored: set[int], base: str) -> None:
        self._started, self._deadline = _clock(), deadline
        self._walk_until = self._started + (deadline - self._started) * _WALKING
        self._satisfied: float | None = None  # since when there is a root for each group
        self._ranked: tuple[float, float, list[int]] = (-math.inf, 0.0, [])  # when, how long it took, the ranks
        self._roots = Roots(base)
        self._variables, self._running = unseen.variables(base)
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}  # in that list, by id
        self._holders: list[list[int]] = []  # places of who refers to it
        self._referrers: list[int] = []  # how many there are
        self._waiting: list[tuple[float, int]] = []
        self._ends: list[int] = []  # places of objects to which nothing refers
        self._beginnings: dict[int, list[_Beginning]] = {}  # by the place of what they refer to
        self._ignored = ignored | {id(self._objects)}
        self._groups = [[self._start(target) for target in group if gc.is_tracked(target)] for group in groups]

    def forget(self) -> None:
        """Let go of all objects."""
        self._objects.clear()

    def run(self) -> None:
        """Search until each group has a root and some more time has passed, nothing is left, or time is out."""
        self._walk()
        if not self._waiting and UNKNOWN in self._ranks() and self._look_deeper():
            self._walk()

    def roots(self, group: int, most: int) -> list[Root]:
        """Return the chains to a group of targets: different roots, best rank first, then shortest.

        Args:
            group: its number.
            most: how many at most.
        """
        found: dict[tuple[Any, ...], Root] = {}
        begun: list[tuple[_Beginning, list[int]]] = []
        ends: list[list[Any]] = []
        waiting = {place for _, place in self._waiting}
        unfinished = waiting or set(self._ends)
        for place, toward in ways.cheapest_first(
            self._groups[group], self._holders, self._price, self._detour, self._deadline
        ):
            if place in self._beginnings:
                way = ways.path(place, toward)
                begun += [(beginning, way) for beginning in self._beginnings[place]]
            elif place in unfinished and len(ends) < most:
                ends.append([self._objects[at] for at in ways.path(place, toward)])
        begun.sort(key=lambda start: (start[0].rank, len(start[1])))
        for beginning, way in begun[:_MOST_NAMED]:
            if found and _clock() >= self._deadline:
                break
            with contextlib.suppress(Exception):  # one odd object must not hide the other roots
                root = self._name(beginning, [self._objects[at] for at in way])
                known = found.get(root.key)
                if known is None or _order(root) < _order(known):
                    found[root.key] = root
        if not found:
            # Targets that hold each other in a circle have no end.
            ends = ends or [[self._objects[target]] for target in self._groups[group][:1]]
            name = self._roots.name_cut if waiting else self._roots.name_end
            found = {root.key: root for root in map(name, ends)}
        ordered = sorted(found.values(), key=_order)
        # What a library has in a local now, as pytest while it makes a report, goes by itself.
        lasting = [root for root in ordered if root.rank < LIBRARY or root.key[0] != "frame"]
        if lasting and lasting[0].rank < UNKNOWN:
            ordered = lasting
        return ordered[:most]

    def _name(self, beginning: _Beginning, path: list[Any]) -> Root:
        if beginning.variable is not None:
            return self._roots.name_variable(beginning.variable, path)
        return self._roots.name(beginning.kind, [self._objects[beginning.root], *path])

    def _price(self, place: int) -> float:
        """Return what it costs to go on from an object."""
        return 1 + max(0.0, math.log2(max(1, self._referrers[place]) / _FEW_REFERRERS))

    def _detour(self, holder: int) -> float:
        """Return what it costs more to go by way of an object."""
        # A wrapper's function has copies of the attributes of what it wraps (functools.wraps).
        return _DETOUR * (type(self._objects[holder]) is types.FunctionType)

    # Walking.

    def _start(self, target: Any) -> int:
        place = self._places.get(id(target))
        if place is None:
            place = self._store(target)
            heapq.heappush(self._waiting, (0.0, place))
        return place

    def _walk(self) -> None:
        while self._waiting and not self._is_enough():
            limit = self._waiting[0][0] + 1
            batch: list[tuple[float, int]] = []
            while self._waiting and len(batch) < _BATCH and self._waiting[0][0] < limit:
                batch.append(heapq.heappop(self._waiting))
            self._expand(batch)

    def _is_enough(self) -> bool:
        now = _clock()
        if now >= self._walk_until or len(self._objects) >= _MOST_OBJECTS:
            return True
        ranks = self._ranks() if self._beginnings else [UNKNOWN]
        if UNKNOWN in ranks:
            return False
        if self._satisfied is None:
            self._satisfied = now
        # There may be more roots, or better ones: some more time, in proportion to what it has taken so far.
        taken = self._satisfied - self._started
        return now > self._satisfied + (0.1 + taken * 0.5) * (1 + max(ranks))

    def _ranks(self) -> list[int]:
        """Return the best rank of the roots that each group has; where that takes long, had a little earlier."""
        (when, took, ranks), now = self._ranked, _clock()
        if now - when >= _SELDOM * took:
            reached = (ways.reached(group, self._holders, self._walk_until) for group in self._groups)
            ranks = [min(map(self._rank, places), default=UNKNOWN) for places in reached]
            self._ranked = (now, _clock() - now, ranks)
        return ranks

    def _rank(self, place: int) -> int:
        return min((beginning.rank for beginning in self._beginnings.get(place, ())), default=UNKNOWN)

    def _expand(self, batch: list[tuple[float, int]]) -> None:
        # A tuple is passed on as it is; from anything else a new one would be made, which is a referrer too.
        held = tuple([self._objects[place] for _, place in batch])
        referrers = gc.get_referrers(*held)
        own = self._ignored | {id(held), id(referrers)}
        wanted = {id(thing): place for thing, (_, place) in zip(held, batch, strict=True)}
        del held
        new: dict[int, int] = {}  # holders by what they hold
        for number, referrer in enumerate(referrers):
            if number % 1024 == 1023 and _clock() >= self._walk_until:
                break
            if id(referrer) in own:
                continue
            with contextlib.suppress(Exception):  # one odd object must not hide the others
                self._meet(referrer, wanted, new)
        referrers.clear()
        costs = {place: cost for cost, place in batch}
        for holder, place in new.items():
            heapq.heappush(self._waiting, (costs[place] + self._price(place) + self._detour(holder), holder))
        self._ends += [place for _, place in batch if not self._referrers[place]]

    def _meet(self, referrer: Any, wanted: dict[int, int], new: dict[int, int]) -> None:
        """Remember that an object refers to some of the wanted ones."""
        if _is_of_search(referrer, self._running):
            return
        kind = self._roots.kind(referrer)
        holder = self._places.get(id(referrer))
        for place in heap.held_by(referrer, wanted):
            self._referrers[place] += 1
            if kind:
                self._add_root(place, kind, referrer)
            elif self._referrers[place] <= _MOST_REFERRERS:
                if holder is None:
                    holder = self._store(referrer)
                    new[holder] = place
                self._holders[place].append(holder)

    def _store(self, thing: Any) -> int:
        place = self._places[id(thing)] = self._append(thing)
        self._add_variables(place)
        return place

    def _append(self, thing: Any) -> int:
        self._objects.append(thing)
        self._holders.append([])
        self._referrers.append(0)
        return len(self._objects) - 1

    def _add_root(self, place: int, kind: str, thing: Any) -> None:
        rank, known = self._roots.rank(kind, thing), self._beginnings.setdefault(place, [])
        if sum(other.kind == kind and other.rank == rank for other in known) < _MOST_ROOTS:
            known.append(_Beginning(rank, kind, self._append(thing)))

    def _add_variables(self, place: int) -> None:
        for variable in self._variables.get(id(self._objects[place]), ()):
            self._beginnings.setdefault(place, []).append(_Beginning(variable.rank, variable=variable))

    def _look_deeper(self) -> bool:
        """Look for what only C code refers to. Return whether there are new objects to go on from."""
        ends = [self._objects[place] for place in self._ends]
        self._ignored.add(id(ends))
        self._go_on_from(graphs.owners(ends, self._walk_until))
        ends.clear()
        self._go_on_from(arrays.owners(self._places, self._walk_until))
        return bool(self._waiting)

    def _go_on_from(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Go on from owners that the garbage collector does not show."""
        for owner, owned in pairs:
            holder = self._places.get(id(owner))
            if holder is None:
                holder = self._store(owner)
                heapq.heappush(self._waiting, (0.0, holder))
            self._holders[self._start(owned)].append(holder)


def _order(root: Root) -> tuple[int, int]:
    return root.rank, len(root.segments)


def _is_of_search(thing: Any, running: set[int]) -> bool:
    """Whether a frame or a generator runs, or is of this package: they hold what they look at."""
    kind = type(thing)
    if kind is types.FrameType:
        return id(thing) in running or places.is_ours(thing.f_code)
    return safely.is_among(kind, GENERATORS) and places.is_ours(generator_code(thing))
