"""What lies between a root and what it holds, link by link."""

from __future__ import annotations

import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

from pytest_vllm_cleanup.diagnosis import callables, graphs, safely, things
from pytest_vllm_cleanup.diagnosis.segments import Namer, Path, Segment, Spot, Step, code, words

# Said by what is before or behind them.
_SILENT = (types.TracebackType, types.CellType, staticmethod, classmethod, property, types.MappingProxyType)
_PYTESTS_OWN = ("Traceback", "TracebackEntry")  # as ``ExceptionInfo.traceback`` gives them
_CALLBACK: Any = vars(weakref.ref)["__callback__"]
_BY_TYPE: Mapping[type, Namer] = {
    types.FrameType: callables.name_frame,
    types.FunctionType: callables.name_function,
    types.MethodType: callables.name_method,
    types.BuiltinMethodType: callables.name_method,
    callables.LRU_CACHE: callables.name_lru_cache,
    functools.partial: callables.name_partial,
    contextvars.Context: things.name_context,
    **dict.fromkeys(callables.GENERATORS, callables.name_generator),
}
_BY_ID = {id(kind): namer for kind, namer in _BY_TYPE.items()}  # a class may have a ``__hash__`` of its own
_BY_BASE: tuple[tuple[type, Namer], ...] = (
    (BaseException, things.name_exception),
    (type, things.name_class),
    (threading.local, things.name_thread_local),
    (object, things.name_instance),
    (object, things.name_container),
)


def name_links(path: Path, start: int, first: Segment | None, base: str) -> list[Segment]:
    """Name what lies between a root and what it holds.

    Args:
        path: the objects, from the root to what is held.
        start: where to begin in it.
        first: what has been said up to there; accesses to containers are appended to it.
        base: the folder to which paths of files are relative.

    Returns:
        the segments, ``first`` included; the last one is the name of what is held.
    """
    segments = [] if first is None else [first]
    at = start
    while at < len(path) - 1:
        step = name_step(Spot(path, at, base))
        if step.segment is not None:
            segments.append(step.segment)
        elif step.access:
            if segments and segments[-1].open and things.is_plain(path[at]):
                segments[-1].expression += step.access
            else:
                segments.append(code(f"{safely.type_name(path[at])}{step.access}"))
        at += step.used
    segments.append(words(safely.type_name(path[-1])))
    return segments


def name_step(spot: Spot) -> Step:
    """Name how an object holds the next one; by its class alone if that cannot be told."""
    kind = type(spot.holder)
    if safely.is_among(kind, _SILENT) or (
        safely.class_name(kind) in _PYTESTS_OWN and safely.module_of(kind) == "_pytest._code.code"
    ):
        return Step()
    try:
        if id(kind) in _BY_ID:
            step = _BY_ID[id(kind)](spot)
            if step is not None:
                return step
        if issubclass(kind, weakref.ref) and _CALLBACK.__get__(spot.holder) is spot.held:
            return Step(segment=words("callback of a weakref"))
        if graphs.gradient(spot.holder) is spot.held:
            return Step(access=".grad")
        for base, namer in _BY_BASE:
            step = namer(spot) if issubclass(kind, base) else None
            if step is not None:
                return step
        if graphs.is_tensor(kind) and graphs.is_tensor(type(spot.held)):
            return Step(segment=words(f"autograd graph of {safely.type_name(spot.holder)}"))
    except Exception:  # one odd object must not spoil the chain
        pass
    return Step(segment=words(safely.type_name(spot.holder)))
