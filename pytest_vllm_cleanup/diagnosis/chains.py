"""The shortest chains of references that keep an object, from roots on which a person can act."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.diagnosis.search import Search

_KEPT_AT_START, _KEPT_AT_END = 3, 2


@dataclass(frozen=True, slots=True)
class Chain:
    """Who holds something, in words.

    Attributes:
        root: where the chain begins: ``tests/test_x.py: module global CACHE['llm']``.
        links: what lies between, and as the last one what is held: ``("LLM.llm_engine", ..., "Tensor")``.
        rank: 0: the user's code, a fixture, a frame, a thread; 1: a known holder of vLLM; 2: a library; 3: no root
            was found.
    """

    root: str
    links: tuple[str, ...]
    rank: int

    def __str__(self) -> str:
        segments = [self.root, *self.links]
        if len(segments) > _KEPT_AT_START + _KEPT_AT_END + 1:
            segments[_KEPT_AT_START:-_KEPT_AT_END] = ["..."]
        return " -> ".join(segments)


def find_chains(
    targets: list[Any], *, deadline: float, most: int = 3, ignore: Iterable[object] = (), base: str | None = None
) -> list[Chain]:
    """Find who holds an object.

    Args:
        targets: the object, or several that are one thing for a person, as the tensors of one storage are. The list
            is emptied, so that the caller need not hold them.
        deadline: when to stop, on the clock of ``time.monotonic``.
        most: how many chains to return at most.
        ignore: what holds them, too, and is not to be named.
        base: the folder to which paths are relative, the current one if None.

    Returns:
        The shortest chains from different roots, best rank first, then shortest. They are text alone.
    """
    return find_chains_to_each([targets], deadline=deadline, most=most, ignore=ignore, base=base)[0]


def find_chains_to_each(
    groups: Sequence[list[Any]],
    *,
    deadline: float,
    most: int = 3,
    ignore: Iterable[object] = (),
    base: str | None = None,
) -> list[list[Chain]]:
    """Find who holds each of several things, in hardly more time than one of them takes.

    Garbage collection stands still meanwhile, and objects that were frozen (``gc.freeze``) are unfrozen, because the
    collector shows no others.

    Args:
        groups: as ``targets`` of ``find_chains``, one list a thing.
        deadline: see ``find_chains``.
        most: see ``find_chains``; of each thing.
        ignore: see ``find_chains``.
        base: see ``find_chains``.

    Returns:
        The chains of each group, as of ``find_chains``.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if gc.get_freeze_count():
            gc.unfreeze()
        ignored = {id(thing) for thing in (*ignore, groups, *groups)}
        search = Search(groups, deadline, ignored, str(Path.cwd()) if base is None else base)
        for targets in groups:
            targets.clear()
        try:
            search.run()
            return [[_chain(root) for root in search.roots(group, most)] for group in range(len(groups))]
        finally:
            search.forget()
    finally:
        if was_enabled:
            gc.enable()


def _chain(root: Any) -> Chain:
    return Chain(root.segments[0], root.segments[1:], root.rank)
