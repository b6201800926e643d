"""How functions, methods, frames and generators hold something."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from pytest_vllm_cleanup.diagnosis import places, safely
from pytest_vllm_cleanup.diagnosis.segments import Segment, Spot, Step, code, words

LRU_CACHE = functools._lru_cache_wrapper
GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_GENERATOR_NAMES = {
    id(types.GeneratorType): ("generator", "gi"),
    id(types.CoroutineType): ("coroutine", "cr"),
    id(types.AsyncGeneratorType): ("async generator", "ag"),
}  # by the class, of which nothing but its identity is asked


def is_function(thing: object) -> bool:
    """Whether it is a Python function, or one with a ``functools.lru_cache``."""
    return type(thing) is types.FunctionType or type(thing) is LRU_CACHE


def function_text(function: Any) -> str:
    """Return the name of something callable."""
    kind = type(function)
    if kind is types.FunctionType:
        return str(function.__qualname__)
    if kind is types.MethodType and type(function.__func__) is not types.FunctionType:
        return f"method of {safely.type_name(function.__self__)}"  # what it calls may have a name of its own making
    if safely.is_among(kind, (types.MethodType, types.BuiltinMethodType)):
        own, name = function.__self__, function.__name__
        return name if own is None or type(own) is types.ModuleType else f"{safely.type_name(own)}.{name}"
    if kind is functools.partial:
        return f"functools.partial of {function_text(function.func)}"
    if kind is LRU_CACHE:
        return function_text(safely.attribute(function, "__wrapped__"))
    return safely.class_name(function if issubclass(kind, type) else kind)


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of the positional parameters of a Python function, without a method's bound first one."""
    skip = 0
    if type(function) is types.MethodType:
        function, skip = function.__func__, 1
    if type(function) is not types.FunctionType:
        return ()
    names: tuple[str, ...] = function.__code__.co_varnames[skip : function.__code__.co_argcount]
    return names


def argument(function: Any, arguments: Any, held: object) -> str:
    """Return the parameter that gets an object, of a call whose arguments are in a tuple or a dictionary."""
    if type(arguments) is dict:
        return str(safely.key_holding(arguments, held))
    number = safely.index(arguments, held)
    names = parameters(function)
    return names[number] if number < len(names) else f"number {number}"


def name_function(spot: Spot) -> Step:
    """Name what a function has: variables of its closure, defaults, attributes."""
    function, held, deeper = spot.holder, spot.held, spot.ahead(2)
    own = function.__qualname__
    if not spot.has(2):
        return Step(segment=words(f"function {own}"))
    if held is function.__closure__:
        name = function.__code__.co_freevars[safely.index(held, deeper)]
        return Step(3 if spot.has(3) else 2, Segment("closure variable ", name, f" of {own}", open=True))
    if held is function.__defaults__:
        name = parameters(function)[-len(held) :][safely.index(held, deeper)]
        return Step(2, Segment("default argument ", name, f" of {own}", open=True))
    if held is function.__kwdefaults__:
        return Step(2, Segment("default argument ", str(safely.key_holding(held, deeper)), f" of {own}", open=True))
    if held is function.__dict__ and type(name := safely.key_holding(held, deeper)) is str:
        return Step(2, code(f"{own}.{name}", "function attribute "))
    return Step(segment=words(f"function {own}"))


def name_method(spot: Spot) -> Step:
    """Name a bound method."""
    return Step(segment=words(f"method {function_text(spot.holder)}"))


def name_lru_cache(spot: Spot) -> Step:
    """Name an argument or a result that a cache keeps."""
    cache, held, used = spot.holder, spot.held, 1
    function = safely.attribute(cache, "__wrapped__")
    cached = f"functools.lru_cache of {function_text(function)}"
    if type(held) is dict and spot.has(2):
        entries, held, used = held, spot.ahead(2), 2
    else:
        entries = next((part for part in gc.get_referents(cache) if type(part) is dict), {})
    if held is function:
        return Step(used, words(cached))
    if all(key is not held for key, _ in safely.items(entries)):
        return Step(used, Segment(f"{cached} (", "result", ")", open=True, quoted=False))
    if type(held) is not tuple or not spot.has(used + 1):
        return Step(used, words(f"{cached} (an argument)"))
    which = argument(function, held, spot.ahead(used + 1))
    return Step(used + 1, Segment(f"{cached} (argument ", which, ")", open=True))


def name_partial(spot: Spot) -> Step | None:
    """Name the function or an argument of a ``functools.partial``."""
    partial, held = spot.holder, spot.held
    own = f"functools.partial of {function_text(partial.func)}"
    if (held is partial.args or held is partial.keywords) and spot.has(2):
        return Step(2, Segment("argument ", argument(partial.func, held, spot.ahead(2)), f" of {own}", open=True))
    return Step(segment=words(own)) if held is partial.func else None


def name_frame(spot: Spot) -> Step:
    """Name a local variable of a frame that does not run, as tracebacks keep them."""
    frame = spot.holder
    if spot.held is frame.f_back:
        return Step()
    where = places.line(frame.f_code, frame.f_lineno, spot.base)
    own = f"frame {places.function_name(frame.f_code)} ({where})"
    return _local(spot, frame, own) or Step(segment=words(own))


def name_generator(spot: Spot) -> Step:
    """Name a local variable of a generator or a coroutine that is half run."""
    kind, prefix = _GENERATOR_NAMES[id(type(spot.holder))]
    frame, run = getattr(spot.holder, f"{prefix}_frame"), generator_code(spot.holder)
    where = places.line(run, None if frame is None else frame.f_lineno, spot.base)
    own = f"suspended {kind} {places.function_name(run)} ({where})"
    if frame is None:
        return Step(segment=words(own))
    if spot.held is frame:
        step = _local(Spot(spot.path, spot.at + 1, spot.base), frame, own) if spot.has(2) else None
        return Step(step.used + 1, step.segment) if step else Step(2, words(own))
    return _local(spot, frame, own) or Step(segment=words(own))


def generator_code(generator: Any) -> types.CodeType:
    """Return what a generator, a coroutine or an async generator runs."""
    run: types.CodeType = getattr(generator, f"{_GENERATOR_NAMES[id(type(generator))][1]}_code")
    return run


def _local(spot: Spot, frame: types.FrameType, own: str) -> Step | None:
    used = 2 if safely.is_among(type(spot.held), (types.CellType, dict)) and spot.has(2) else 1
    names = local_names(frame)
    for ahead in range(1, used + 1):  # a dictionary may be a variable, or the copy that is made of all of them
        name = names.get(id(spot.ahead(ahead)))
        if name is not None:
            return Step(ahead, Segment("local ", name, f" of {own}", open=True))
    return None


def stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Iterate over a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local_names(frame: types.FrameType, ident: int | None = None) -> dict[int, str]:
    """Return the names of a frame's local variables by the ids of their values.

    Up to Python 3.12 a frame keeps the dictionary that it was asked for, with references to all values. It is
    emptied, unless it is somebody else's too, or a tracer or a profiler may be about to write it back: that would
    take the variables from whoever runs. So a frame that runs in another thread keeps its values until it ends, or
    until it is asked again.

    Args:
        frame: it.
        ident: the thread that runs it; looked for if None.
    """
    variables = frame.f_locals
    names = {id(value): name for name, value in reversed(list(variables.items()))}
    if (
        type(variables) is dict
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # otherwise it is no copy, but the namespace of a module
        and frame.f_trace is None
        and not _may_be_written_back(frame, ident)
        and sys.getrefcount(variables) <= 3  # the frame's, ours, and the argument
    ):
        variables.clear()
    return names


def _may_be_written_back(frame: types.FrameType, ident: int | None) -> bool:
    """Whether a frame is being executed, other than in this thread without a tracer or a profiler."""
    if ident is None:
        tops = sys._current_frames().items()
        ident = next((number for number, top in tops if any(at is frame for at in stack(top))), None)
    if ident is None:
        return False
    return ident != threading.get_ident() or sys.gettrace() is not None or sys.getprofile() is not None
