"""References that the garbage collector does not show: locals of running frames, and what only C code holds."""

from __future__ import annotations

import contextvars
import functools
import inspect
import signal
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from pytest_vllm_cleanup.diagnosis import places, safely
from pytest_vllm_cleanup.diagnosis.callables import local_names, stack
from pytest_vllm_cleanup.diagnosis.ranks import LIBRARY, UNKNOWN, USERS
from pytest_vllm_cleanup.diagnosis.segments import Path, Segment, words

_C_CODE = "C code or the interpreter (no Python object refers to it)"
_AT_EXIT = "C code or the interpreter (no Python object refers to it), perhaps an atexit callback"
_AT_EXIT_KINDS = (tuple, dict, types.FunctionType, types.MethodType, functools.partial)
_OPTIMIZED = inspect.CO_OPTIMIZED  # a function's, as opposed to a module's or a class body's


@dataclass(frozen=True, slots=True)
class Variable:
    """Something outside the heap that refers to an object, and is a root for that.

    Attributes:
        rank: see ``Chain``.
        key: the same for two that a person takes for one.
        segment: its name.
    """

    rank: int
    key: tuple[Any, ...]
    segment: Segment


Variables = dict[int, list[Variable]]  # by the id of what is held


def variables(base: str) -> tuple[Variables, set[int]]:
    """Return what running frames, the current context and the signal handlers refer to, without holding it.

    Frames of this package that are running the search are left out.

    Args:
        base: the folder to which paths are relative.

    Returns:
        the variables, and the ids of all running frames.
    """
    found: Variables = {}
    running: set[int] = set()
    for ident, top in list(sys._current_frames().items()):
        frames = list(stack(top))
        running.update(map(id, frames))
        # The user's first: a thread is named once, and its locals are often handed on to a library.
        frames.sort(key=lambda frame: not places.is_users(frame.f_code.co_filename))
        for frame in frames:
            if frame.f_code.co_flags & _OPTIMIZED and not places.is_ours(frame.f_code):
                _add_locals(found, frame, ident, base)
    for variable, value in contextvars.copy_context().items():
        segment = Segment("context variable ", variable.name, open=True)
        _add(found, value, Variable(USERS, ("context", variable.name), segment))
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler is not None and not issubclass(type(handler), int):
            segment = words(f"signal handler of {signal.Signals(number).name}")
            rank = USERS if places.is_users_function(handler) else LIBRARY
            _add(found, handler, Variable(rank, ("signal", number), segment))
    return found, running


def _add(found: Variables, value: object, variable: Variable) -> None:
    found.setdefault(id(value), []).append(variable)


def _add_locals(found: Variables, frame: types.FrameType, ident: int, base: str) -> None:
    code, elsewhere = frame.f_code, ident != threading.get_ident()
    users = places.is_users(code.co_filename)
    before = f"{thread_text(ident)}: local " if elsewhere else "local "
    after = f" of frame {places.function_name(code)} ({places.line(code, frame.f_lineno, base)})"
    for value, name in local_names(frame, ident).items():
        key = ("thread", ident) if elsewhere else ("frame", id(frame), name)
        segment = Segment(before, name, after, open=True)
        found.setdefault(value, []).append(Variable(USERS if users or elsewhere else LIBRARY, key, segment))


def thread_text(ident: int) -> str:
    """Return what to call a thread."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    name = None if thread is None else safely.attribute(thread, "_name")
    return f"thread {name!r}" if type(name) is str else f"thread {ident}"


def end(path: Path) -> Variable:
    """Return what holds an object to which no Python object refers, as far as it can be told.

    Which functions are to be called when the interpreter ends cannot be seen: they and their arguments are in C code,
    which only compares them, and that may run code of theirs.

    Args:
        path: the objects, from that one to the one that is looked for.
    """
    text = _AT_EXIT if safely.is_among(type(path[0]), _AT_EXIT_KINDS) else _C_CODE
    return Variable(UNKNOWN, ("end", id(path[0])), words(text))
