"""The sweep beside the table: LRU caches of vLLM that hold modules or tensors, whatever they are called."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import time
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any

from pytest_vllm_cleanup.engines.holders.entry import Released

_LRU_CACHE = functools._lru_cache_wrapper
_CONTAINERS = frozenset(
    {tuple, list, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque}
)
# Objects looked at in one cache. A cache of long token lists would cost more than all others together.
_OBJECTS_PER_CACHE = 2000


def clear_lru_caches_holding(package: str = "vllm") -> list[Released]:
    """Clear each `functools.lru_cache` of a package whose keys or values reach a module or a tensor.

    Keys and values are followed through containers, bound methods and objects of the package's own
    classes. Only module globals and class attributes of loaded modules are looked at, and nothing is
    evaluated on them.

    Clearing costs the next caller a computation. Caches that hold a workspace which a live engine uses are
    among them, so call it for the last engine of the process.

    Args:
        package: dotted name of the package, as of vLLM itself or of a package that adds models to it.

    Returns:
        The caches that were cleared.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    kinds = (torch.nn.Module, torch.Tensor)
    return [_clear(cache) for cache in _caches(package) if _reaches(cache, kinds, package)]


def _clear(cache: Any) -> Released:
    start = time.perf_counter()
    cache.cache_clear()
    return Released(f"{cache.__module__}.{cache.__qualname__}", time.perf_counter() - start)


def _caches(package: str) -> Iterator[Any]:
    """LRU caches with entries that are defined in loaded modules of a package, each once."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not _inside(name, package) or not issubclass(type(module), ModuleType):
            continue
        for cache in _attributes(module, name):
            if id(cache) in seen or not _inside(getattr(cache, "__module__", None), package):
                continue
            seen.add(id(cache))
            if cache.cache_info().currsize:
                yield cache


def _attributes(module: ModuleType, name: str) -> Iterator[Any]:
    for value in list(vars(module).values()):
        kind = type(value)
        if kind is _LRU_CACHE:
            yield value
        elif issubclass(kind, type):
            members = vars(value)
            if members.get("__module__") == name:  # not the classes that the module only imports
                for member in list(members.values()):
                    plain = member.__func__ if type(member) in (staticmethod, classmethod) else member
                    if type(plain) is _LRU_CACHE:
                        yield plain


def _inside(name: object, package: str) -> bool:
    return type(name) is str and (name == package or name.startswith(f"{package}."))


def _reaches(cache: Any, kinds: tuple[type[Any], ...], package: str) -> bool:
    """Whether a key or value of a cache is, or has within reach, an object of one of the kinds."""
    queue = collections.deque(gc.get_referents(cache))
    seen: set[int] = set()
    while queue and len(seen) < _OBJECTS_PER_CACHE:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if issubclass(kind, kinds):
            return True
        if issubclass(kind, type):
            continue
        followed = kind in _CONTAINERS or kind in (MethodType, functools.partial)
        if followed or _inside(vars(kind).get("__module__"), package):
            queue.extend(gc.get_referents(item))
    return False
