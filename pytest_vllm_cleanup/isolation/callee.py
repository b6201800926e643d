"""A function in the fresh process: called, its result or its exception sent, its engines closed."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.close import close_handle
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.isolation import cargo, coverage, neighbour_memory
from pytest_vllm_cleanup.isolation.neighbour_memory import Piece
from pytest_vllm_cleanup.isolation.wire import Wire
from pytest_vllm_cleanup.processes.watchdog import current_watchdog
from pytest_vllm_cleanup.workers import starting

_INTERRUPTED = 128 + signal.SIGINT


def run_function(order: dict[str, Any], wire: Wire) -> int:
    """Call the function of an order.

    Two files come with the order: what is to be called, and where the answer goes. The answer is a dictionary with how
    it went, then the result, or the exception if it can be brought to the caller. Its big pieces stay where they are
    until the caller says "taken"; if it says "write" before, they are written to the file.

    Args:
        order: the names that the caller has itself, and how it is measured by coverage.
        wire: where messages go.

    Returns:
        the exit status of the process.
    """
    status = 0
    source, target = wire.take_descriptors()
    _write_at_once()
    instrument.install()
    starting.install()  # below a worker: not beside the start of another one's engine
    try:
        _tell(wire, "started")
        files = open(source, "r+b"), open(target, "w+b")  # noqa: PTH123, SIM115
        with files[0] as call, files[1] as answer:
            kept: list[Any] = []
            with coverage.measured(order["coverage"]):
                pieces = _call(call, answer, order["known"], kept)
            if pieces is None:
                return 0
            _hand_over(pieces, answer, wire)
            del pieces
            kept.clear()
    except KeyboardInterrupt:  # the caller's; nobody waits for the answer
        status = _INTERRUPTED
    for handle in reversed(list(registry.handles())):
        try:
            errors = close_handle(handle).errors
        except Exception as problem:
            errors = [f"{handle}: {type(problem).__name__}: {problem}"]
        _tell(wire, "closed", errors)
    current_watchdog().close()
    starting.leave()
    _tell(wire, "exits")
    return status


def _tell(wire: Wire, name: str, data: Any = None) -> None:
    with suppress(OSError):  # the caller is gone, and the watchdog on its way
        wire.send(name, data)


def _call(call: IO[bytes], answer: IO[bytes], known: cargo.Names, kept: list[Any]) -> list[Piece] | None:
    """Call the function and write the answer.

    Args:
        call: file with the function and its arguments.
        answer: file for the answer.
        known: names that the caller has itself.
        kept: gets what may own the memory of the pieces.

    Returns:
        what is big in the answer; None in a fork of the function's, which comes back from it as well.
    """
    me = os.getpid()
    call.seek(0)
    try:
        function, args, kwargs = cargo.unpack(call)
    except Exception as problem:
        return _pack(answer, {"how": "not loaded", **_facts(problem)})
    call.truncate(0)  # it was memory
    kept += [function, args, kwargs]
    try:
        result = function(*args, **kwargs)
        kept.append(result)
        del function, args, kwargs
    except BaseException as problem:
        kept.append(problem)
        return _answer_error(answer, problem, known) if os.getpid() == me else None
    if os.getpid() != me:
        return None
    try:
        _pack(answer, {"how": "returned"})
        return cargo.pack_answer(answer, result, known)
    except Exception as problem:
        return _pack(answer, {"how": "not returned", "advice": _advice(result, problem), **_facts(problem)})


def _hand_over(pieces: list[Piece], answer: IO[bytes], wire: Wire) -> None:
    """Say that there is an answer, and keep what is big in it until the caller has it."""
    locked = [memoryview(piece) for piece in pieces]  # what a thread of the function's cannot resize
    _tell(wire, "answered", neighbour_memory.locate(pieces))
    while locked:
        try:
            if wire.receive()[0] == "taken":
                return
        except (EOFError, OSError):  # the caller is gone, and the watchdog on its way
            return
        except Exception:  # of a signal handler of the function's
            continue
        try:
            starts = cargo.write_pieces(answer, locked)
        except Exception as problem:  # no room
            _tell(wire, "not written", _facts(problem))
            return
        _tell(wire, "written", starts)


def _answer_error(answer: IO[bytes], error: BaseException, known: cargo.Names) -> list[Piece]:
    facts = {"how": "raised", **_facts(error)}
    if not _passes_on(error):
        return _pack(answer, {**facts, "why": ""})
    try:
        _pack(answer, {**facts, "why": None})
        start = answer.tell()
        pieces = cargo.pack_answer(answer, error, known)
        answer.seek(start)
        # Many a constructor does not take what its base class remembers of it.
        copy = cargo.unpack(answer, cargo.copies(pieces))
        if type(copy) is not type(error):
            raise TypeError(f"it comes out as {type(copy).__name__}")
        return pieces
    except Exception as problem:
        return _pack(answer, {**facts, "why": f"{type(problem).__name__}: {problem}"})


def _pack(answer: IO[bytes], facts: dict[str, Any]) -> list[Piece]:
    answer.seek(0)
    answer.truncate()
    return cargo.pack_answer(answer, facts, {})


def _passes_on(error: BaseException) -> bool:
    """Whether the caller gets this exception itself. Others, such as SystemExit, would end it, and not just a call."""
    outcome = getattr(sys.modules.get("_pytest.outcomes"), "OutcomeException", Exception)
    return isinstance(error, (Exception, outcome))


def _facts(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        text = str(error)
    except Exception as problem:
        text = f"(its text cannot be had: {type(problem).__name__})"
    return {"type": module + kind.__qualname__, "text": text, "traceback": _traceback(error)}


def _traceback(error: BaseException) -> str:
    inner: TracebackType | None = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    try:
        return "".join(traceback.TracebackException(type(error), error, inner).format())
    except Exception as problem:
        return f"(its traceback cannot be had: {type(problem).__name__}: {problem})"


def _advice(result: object, problem: Exception) -> str:
    if isinstance(problem, cargo.DeviceTensorError):
        return "return .cpu() of it: a tensor on a device would make a CUDA context in the caller"
    if inspect.isgenerator(result):
        return "return a list of what the generator yields"
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine has to be run in there: return asyncio.run(...) of it"
    if inspect.isasyncgen(result):
        return "collect what the asynchronous generator yields in there, and return a list"
    return "return plain data: numbers, text, lists, dictionaries, arrays"


def _write_at_once() -> None:
    """Have everything that is printed leave the process at once: if it is killed, nothing of it is lost."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        usual = getattr(sys, name)
        if usual is None:
            continue
        raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            _Prompt(raw), encoding=usual.encoding, errors=usual.errors, newline="\n", write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Prompt(io.BufferedWriter):
    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self.flush()
        return written
