"""The few ways in which a known pin is released.

Every action is harmless when there is nothing to release, and keeps no reference to what it releases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from pytest_vllm_cleanup.engines.holders.entry import Place

_LRU_CACHE = functools._lru_cache_wrapper


@dataclass(frozen=True)
class Clear:
    """Empty a mapping, list or set in place: other modules may have imported the very object."""

    def holds(self, place: Place) -> bool:
        """Whether it has any entry."""
        return bool(_size(place.value))

    def run(self, place: Place) -> None:
        """Empty it."""
        place.value.clear()


@dataclass(frozen=True)
class Blank:
    """Set every item of a list to None: the list's length has a meaning of its own."""

    def holds(self, place: Place) -> bool:
        """Whether any item is not None."""
        return any(item is not None for item in place.value)

    def run(self, place: Place) -> None:
        """Set the items to None, in place."""
        place.value[:] = [None] * len(place.value)


@dataclass(frozen=True)
class CacheClear:
    """Empty a `functools.lru_cache`, also one on a method, class method or static method."""

    def holds(self, place: Place) -> bool:
        """Whether the cache has any entry; a function that is not cached in this release has none."""
        cache = _function(place.value)
        return type(cache) is _LRU_CACHE and cache.cache_info().currsize > 0

    def run(self, place: Place) -> None:
        """Empty the cache."""
        _function(place.value).cache_clear()


@dataclass(frozen=True)
class ClosureClear:
    """Empty the lists that a caching decorator keeps in its closure."""

    def holds(self, place: Place) -> bool:
        """Whether any such list has entries."""
        return any(_closure_lists(place.value))

    def run(self, place: Place) -> None:
        """Empty the lists in place."""
        for entries in _closure_lists(place.value):
            entries.clear()


@dataclass(frozen=True)
class SetToNone:
    """Let go of a lazily made object; its user makes another when it is next needed."""

    def holds(self, place: Place) -> bool:
        """Whether the attribute is anything but None."""
        return place.value is not None

    def run(self, place: Place) -> None:
        """Set the attribute to None."""
        place.rebind(None)


@dataclass(frozen=True)
class Fresh:
    """Put a new object of a do-nothing class of the same module in place of the one that holds something."""

    class_name: str

    def holds(self, place: Place) -> bool:
        """Whether the object is of any other class."""
        return type(place.value).__name__ != self.class_name

    def run(self, place: Place) -> None:
        """Put a new do-nothing object in its place."""
        place.rebind(vars(place.module)[self.class_name]())


@dataclass(frozen=True)
class Call:
    """Call the module's own function for it, where that does more than let go of one object."""

    function: str

    def holds(self, place: Place) -> bool:
        """Whether the attribute is neither None nor an empty container."""
        return place.value is not None and _size(place.value) != 0

    def run(self, place: Place) -> None:
        """Call the function without arguments."""
        vars(place.module)[self.function]()


@dataclass(frozen=True)
class ShutDown:
    """Shut an object down if it can be, and let go of it also when that fails."""

    def holds(self, place: Place) -> bool:
        """Whether there is an object."""
        return place.value is not None

    def run(self, place: Place) -> None:
        """Shut it down and set the attribute to None."""
        try:
            shutdown = getattr(place.value, "shutdown", None)
            if shutdown is not None:
                shutdown()
        finally:
            place.rebind(None)


@dataclass(frozen=True)
class UncacheGetattr:
    """Take the cache off a module's `__getattr__`, however often it was put on.

    vLLM has a function for it from 0.14.1 on; before, engines of one process wrap it again and again.
    """

    def holds(self, place: Place) -> bool:
        """Whether it is cached now."""
        return type(place.value) is _LRU_CACHE

    def run(self, place: Place) -> None:
        """Store the plain function."""
        while type(place.value) is _LRU_CACHE:
            place.rebind(place.value.__wrapped__)


@dataclass(frozen=True)
class ForgetGraphPool:
    """Forget the CUDA-graph pool handle of the current platform.

    vLLM stores it on the class of the current platform, not on the base class that declares it.
    """

    def holds(self, place: Place) -> bool:
        """Whether any class of the current platform has a handle."""
        return any(vars(cls).get(place.name) is not None for cls in _platform_classes(place))

    def run(self, place: Place) -> None:
        """Set the handle to None wherever it was stored."""
        for cls in _platform_classes(place):
            if vars(cls).get(place.name) is not None:
                setattr(cls, place.name, None)


def _platform_classes(place: Place) -> set[type[Any]]:
    """Classes of the current platform, read past `vllm.platforms.__getattr__`, which would resolve it."""
    platforms = sys.modules.get("vllm.platforms")
    current = vars(platforms).get("_current_platform") if platforms is not None else None
    classes = set() if current is None else set(type(current).__mro__)
    if isinstance(place.owner, type):
        classes.add(place.owner)
    return classes


def _size(value: object) -> int | None:
    """Count the entries of a container; None for anything else, as a tensor's length is no such number."""
    if issubclass(type(value), Sized) and hasattr(type(value), "clear"):
        return len(value)  # type: ignore[arg-type]  # mypy does not narrow by type(value)
    return None


def _function(value: Any) -> Any:
    """Undo the wrapping of a class attribute by `staticmethod` or `classmethod`."""
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _closure_lists(function: Any) -> list[list[object]]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if type(cell.cell_contents) is list]
