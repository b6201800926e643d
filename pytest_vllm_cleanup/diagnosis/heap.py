"""Finding the live objects of some classes, and what an object refers to, without running any code of theirs.

Finding them costs 100 ms for a million live objects, nearly all of it inside the interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import types
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

from pytest_vllm_cleanup.diagnosis import safely

_get_objects = gc.get_objects
_NAMESPACE: Any = vars(types.ModuleType)["__dict__"]
# "A pointer to the PyModuleDef struct from which the module was created, or NULL" (Python/C API, Module Objects).
_definition_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyModule_GetDef", ctypes.pythonapi))


def instances(kinds: Iterable[int]) -> list[Any]:
    """Return the live objects whose class is one of ``kinds``, given by identity.

    Objects that a program froze (``gc.freeze``) are unfrozen for it: they are not listed otherwise.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    wanted = frozenset(kinds)
    things: list[Any] = _get_objects()
    # No loop of ours over millions of objects.
    return list(compress(things, map(wanted.__contains__, map(id, map(type, things)))))


def with_subclasses(kind: type) -> Iterator[type]:
    """Iterate over a class and all that are derived from it, each once."""
    waiting, seen = [kind], set()
    while waiting:
        kind = waiting.pop()
        if id(kind) not in seen:
            seen.add(id(kind))
            yield kind
            waiting += type.__subclasses__(kind)


def referents(thing: Any) -> list[Any]:
    """Return what an object refers to, as the garbage collector shows it; of a module written in C, only its namespace.

    The code of such a module may show objects that are dead, and kept to be used again, as ``_asyncio`` of Python 3.12
    does. Whoever takes a reference to such a one and drops it lets it die twice, and its list of the dead becomes a
    circle, in which the collector's next walk goes round for ever.
    """
    if issubclass(type(thing), types.ModuleType) and _definition_of(thing):
        return [_NAMESPACE.__get__(thing)]
    return gc.get_referents(thing)


def referents_of_many(things: list[Any]) -> list[Any]:
    """Return what any of some objects refers to, as ``referents`` does."""
    kinds = frozenset(map(id, with_subclasses(types.ModuleType)))
    # No loop of ours over millions of objects.
    are_modules = list(map(kinds.__contains__, map(id, map(type, things))))
    found = gc.get_referents(*compress(things, map(operator.not_, are_modules)))
    return found + [held for module in compress(things, are_modules) for held in referents(module)]


def held_by(referrer: Any, wanted: dict[int, int]) -> list[int]:
    """Return which of some objects another one refers to.

    Args:
        referrer: it; it refers to at least one of them.
        wanted: what to return for each of them, by id.
    """
    if len(wanted) == 1:
        return list(wanted.values())
    kind: Any = type(referrer)
    if kind is dict:
        try:
            found = {id(value) for value in dict.values(referrer) if id(value) in wanted}
            found |= {id(key) for key in dict.keys(referrer) if id(key) in wanted}
        except RuntimeError:
            found = set()
    elif safely.is_container(kind) and kind is not types.MappingProxyType:
        try:
            found = {id(value) for value in kind.__iter__(referrer) if id(value) in wanted}
        except RuntimeError:
            found = set()
        if issubclass(kind, dict):
            found |= {id(value) for _, value in safely.items(referrer) if id(value) in wanted}
    else:
        found = {id(value) for value in referents(referrer) if id(value) in wanted}
    return [wanted[known] for known in found]
