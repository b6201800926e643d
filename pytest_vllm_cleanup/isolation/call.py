"""A function in a fresh process, for programs, notebooks and tests."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

from pytest_vllm_cleanup.devices import inventory
from pytest_vllm_cleanup.devices.offered import offer
from pytest_vllm_cleanup.engines.errors import EngineCleanupWarning
from pytest_vllm_cleanup.isolation import cargo, coverage, surroundings
from pytest_vllm_cleanup.isolation.errand import Errand
from pytest_vllm_cleanup.isolation.errors import IsolatedProcessError, RemoteTraceback
from pytest_vllm_cleanup.isolation.neighbour_memory import Piece
from pytest_vllm_cleanup.isolation.output import passed_on
from pytest_vllm_cleanup.memory.units import parse_duration
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

T = TypeVar("T")


@atexit.register
def _dismiss_watchdog() -> None:
    current_watchdog().close()  # in a program; pytest has it dismissed earlier


def run_isolated(
    function: Callable[..., T],
    /,
    *args: Any,
    timeout: float | str | None = None,
    env: Mapping[str, str | None] | None = None,
    gpus: int | Sequence[int | str] | None = None,
    **kwargs: Any,
) -> T:
    """Call a function in a fresh Python process, and return what it returns.

    The process is a new interpreter, never a fork. Function, arguments and result are pickled, whatever their size;
    functions of ``__main__``, of notebooks and local ones work too. What it prints appears here. When this returns, or
    raises, its engines are closed, all processes that it has started have ended, and the driver has their memory back.

    Args:
        function: what to call.
        *args: its arguments.
        timeout: how long it may take, in seconds or as text ("2 min"), the start of the process included; None or 0:
            any time. Then the process, and all that it has started, is ended.
        env: changes to the environment of the process; None removes a variable.
        gpus: how many of the devices that are visible here it sees, or which: a list of ordinals or UUIDs; None: all.
        **kwargs: further arguments of the function.

    Returns:
        the result of the function.

    Raises:
        Exception: what the function raised, with the traceback of its process as its cause.
        IsolatedProcessError: the process has ended before the function returned, by a signal, ``os._exit`` or the like;
            or the function raised what would end this process too (``SystemExit``, ``KeyboardInterrupt``), or an
            exception that cannot be pickled.
        IsolatedTimeoutError: it had not returned in time; a ``TimeoutError``. It has the stacks of its threads.
        MemoryError: there is no memory here for the result.
        TypeError: the function is a generator function or a coroutine function; or the function, an argument or the
            result cannot be pickled; or the result has a tensor on a device.
        ValueError: there are not so many devices, or the timeout cannot be parsed.
    """
    __tracebackhide__ = True  # by pytest
    name = _name_of(function)
    _refuse_generators(function, name)
    limit = None if timeout is None else parse_duration(timeout) or None
    environ = _environment(env or {}, gpus)
    with cargo.memory_file() as call, cargo.memory_file() as answer:
        order = {
            "argv": list(sys.argv),
            "coverage": coverage.settings(),
            "environ": environ,
            "folder": os.curdir,  # where it is started
            "known": _packed(call, (function, args, kwargs), name),
            "path": _path(env or {}),
        }
        with passed_on() as streams:
            errand = Errand(name, environ, streams)
            errand.carry_out(order, call, answer, limit)
        for note in errand.notes:
            warnings.warn(f"{name}: {note}", EngineCleanupWarning, stacklevel=2)
        answer.seek(0)
        facts = cargo.unpack(answer)
        if facts["how"] == "returned" and not errand.unwritten:
            result: T = _result(answer, errand.pieces, name)
            return result
        if facts["how"] == "returned":
            raise _cannot_be_brought(name, f"{errand.unwritten}; there was no room for it, nor may it be read")
        if facts["how"] == "not returned":
            raise _cannot_be_brought(name, f"{facts['type']}: {facts['text']}; {facts['advice']}")
        if errand.unwritten:
            facts["why"] = errand.unwritten
        raise _error(answer, errand.pieces, facts, name) from RemoteTraceback(facts["traceback"])


def _name_of(function: object) -> str:
    return f"run_isolated({getattr(function, '__qualname__', None) or repr(function)})"


def _refuse_generators(function: object, name: str) -> None:
    if not callable(function):
        raise TypeError(f"{name}: not a function. Give the function first, then its arguments: run_isolated(f, 1, 2)")
    for called in (function, getattr(type(function), "__call__", None)):  # noqa: B004  # the method of an object
        if inspect.isasyncgenfunction(called):
            what, instead = "an asynchronous generator function", "collects what it yields, and returns a list"
        elif inspect.isgeneratorfunction(called):
            what, instead = "a generator function", "returns list(...) of it"
        elif inspect.iscoroutinefunction(called):
            what, instead = "a coroutine function", "returns asyncio.run(...) of it"
        else:
            continue
        raise TypeError(f"{name}: this is {what}, and what it gives lives in one process only. Call one that {instead}")


def _environment(changes: Mapping[str, str | None], gpus: int | Sequence[int | str] | None) -> dict[str, str]:
    environ = surroundings.changed(os.environ, changes)
    if gpus is None:
        return environ
    there = inventory.take()
    variables = surroundings.chosen(offer(os.environ, there.cards, there.reason), gpus)
    if twice := sorted(variables.keys() & changes.keys()):
        raise ValueError(f"gpus sets {' and '.join(twice)}; leave it out of env, or gpus out of the call")
    return {**environ, **variables}


def _path(changes: Mapping[str, str | None]) -> list[str]:
    added = changes.get("PYTHONPATH")
    return [*(added.split(os.pathsep) if added else []), *sys.path]


def _packed(file: IO[bytes], call: tuple[Any, ...], name: str) -> cargo.Names:
    try:
        return cargo.pack(file, call)
    except Exception as problem:
        raise TypeError(
            f"{name}: the function, what it refers to, or an argument cannot be sent to another process: {problem}. "
            "Make such things (engines, locks, open files) inside the function"
        ) from problem


def _cannot_be_brought(name: str, why: str) -> TypeError:
    return TypeError(f"{name}: the result cannot be brought to this process: {why}")


def _result(answer: IO[bytes], pieces: Sequence[Piece], name: str) -> Any:
    try:
        return cargo.unpack(answer, pieces)
    except Exception as problem:
        raise TypeError(
            f"{name}: the result cannot be loaded in this process: {type(problem).__name__}: {problem}. "
            "Return plain data: numbers, text, lists, dictionaries, arrays"
        ) from problem


def _error(answer: IO[bytes], pieces: Sequence[Piece], facts: dict[str, Any], name: str) -> BaseException:
    what = f"{facts['type']}: {facts['text']}" if facts["text"] else facts["type"]
    if facts["how"] == "not loaded":
        return IsolatedProcessError(
            f"{name}: the function and its arguments cannot be loaded in a fresh process: {what}. It starts with the "
            "path, the folder and the environment of this one; what was done to this process besides, such as "
            "modules that were made by hand, it does not have"
        )
    why = facts["why"]
    if why is None:
        try:
            error = cargo.unpack(answer, pieces)
            assert isinstance(error, BaseException)
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}"
        else:
            return error
    reason = f"it cannot be pickled: {why}" if why else "it would end this process, too"
    return IsolatedProcessError(
        f"{name}: the function raised {what}\nThis error stands for it, because {reason}. Its traceback is the cause "
        "of this error"
    )
