"""The storages that were there at some moment, by their identity; only the big ones by a reference."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_vllm_cleanup.diagnosis.walk import Found, walk, weak

_clock = time.monotonic  # a test may have stopped it
TIME_TO_TAKE = 0.25
"""Seconds that a look may cost beside Python's heap; what is not reached then is known by its place in memory."""
BIG = 64 * 1024
"""Bytes; smaller storages are not worth a weak reference each."""
MOST_FOLLOWED = 4096


@dataclass(frozen=True, slots=True)
class Known:
    """The storages that Python knew at some moment.

    Attributes:
        big: by identity, weak references to the big ones and their sizes; where there are very many, the sizes alone.
        others: identities of the small ones, in order. One may have been given to a new storage since: a small one that
            has an old identity counts as old.
        unreached: addresses of the Python objects that were not looked at for want of time, in order.
    """

    big: dict[int, tuple[Any | None, int]] = field(default_factory=dict)
    others: array[int] = field(default_factory=lambda: array("Q"))
    unreached: array[int] = field(default_factory=lambda: array("Q"))

    @classmethod
    def on(cls, devices: frozenset[str]) -> Known:
        """Look at some devices, for a limited time."""
        big: dict[int, tuple[Any | None, int]] = {}
        others, left = set(), array("Q")
        for found in walk(devices, _clock() + TIME_TO_TAKE, left):
            if found.bytes < BIG:
                others.add(found.identity)
            elif found.identity not in big:
                big[found.identity] = weak(found.storage) if len(big) < MOST_FOLLOWED else None, found.bytes
        return cls(big, array("Q", sorted(others)), array("Q", sorted(left)))

    def size_of(self, identity: int, size: int, found: Iterable[Found]) -> int:
        """Return the bytes that a storage had then, 0 if it is new.

        Args:
            identity: that of the storage.
            size: its bytes now.
            found: the Python objects on it.
        """
        if identity in self.big:
            reference, before = self.big[identity]
            return 0 if reference is not None and reference.expired() else before
        if size < BIG and _has(self.others, identity):
            return size
        return size if self.unreached and any(_has(self.unreached, id(one.thing)) for one in found) else 0

    def joined(self, others: Known) -> Known:
        """Return what is known of both."""
        return Known(
            self.big | others.big,
            array("Q", sorted({*self.others, *others.others})),
            array("Q", sorted({*self.unreached, *others.unreached})),
        )

    def without(self, others: Known) -> Known:
        """Return this one but for what is known of another."""
        gone = {*others.others, *others.big}
        return Known(
            {identity: known for identity, known in self.big.items() if identity not in gone},
            array("Q", (identity for identity in self.others if identity not in gone)),
            array("Q", sorted({*self.unreached}.difference(others.unreached))),
        )


def _has(ordered: array[int], number: int) -> bool:
    at = bisect_left(ordered, number)
    return at < len(ordered) and ordered[at] == number
