"""Printing an ``LLM`` in bounded time.

From 0.14 on, vLLM's ``LLM.__repr__`` asks the engine for a description of its model, and waits for the answer without a
limit. pytest prints the arguments and, with ``--showlocals``, the locals of a failed test before anything is torn down:
an engine whose processes hang would hang the run right there.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from pytest_vllm_cleanup.engines import shells, stop
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.guard import guarded

_PATIENCE = 5.0  # seconds; an engine that is at work answers between two of its steps
_ARRIVAL = 0.5  # seconds for an answer that has arrived at the last moment to be handed over
_LATE = f"its engine did not answer within {_PATIENCE:g} s"
_CLOSED = frozenset({State.CLOSING, State.CLOSED})

_Future = concurrent.futures.Future[Any]

# Questions that an engine has not answered in time: it is not asked again before it has.
_unanswered: weakref.WeakKeyDictionary[EngineHandle, _Future] = weakref.WeakKeyDictionary()


class _NoAnswerError(Exception):
    """The engine did not answer in time."""


def show(wrapped: Callable[[], str], llm: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str:
    """Stand for ``LLM.__repr__``. The text is vLLM's own wherever its engine can be asked for it."""
    engine = shells.own(llm, "llm_engine")
    handle = None if engine is None else registry.of_engine(engine)
    # With the text at hand vLLM does not ask; without a place for it, it is of a release that never does.
    if handle is None or vars(llm).get("_cached_repr", "") is not None:
        return wrapped()
    reason = None
    with guarded(f"looking whether {handle} can say what it is"):
        reason = _silent(handle)
    if reason is None:
        try:
            with _limited(handle, engine):
                return wrapped()
        except _NoAnswerError as problem:
            problem.__traceback__ = None  # it has the frame of the question, which has the exception
            reason = _LATE
    return f"{object.__repr__(llm)[:-1]}: {reason}>"


def _silent(handle: EngineHandle) -> str | None:
    """Return why an engine is not asked, None if it is."""
    if handle.state in _CLOSED:
        return "its engine is closed"
    if handle.in_process is False and handle.processes and not stop.family(handle)():
        return "its engine has ended"
    question = _unanswered.get(handle)
    return None if question is None or question.done() else _LATE


@contextmanager
def _limited(handle: EngineHandle, engine: Any) -> Iterator[None]:
    """Let a question fail that an engine in child processes does not answer in time.

    Raises:
        _NoAnswerError: in the thread that asks.
    """
    # Futures by number of the call, in all releases. An engine in this process has none, and is not waited for.
    waiting = shells.own(shells.own(engine, "engine_core"), "utility_results")
    if handle.in_process is not False or not isinstance(waiting, dict):
        yield
        return
    timer = threading.Timer(_PATIENCE, _give_up, (handle, waiting, frozenset(waiting)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(handle: EngineHandle, waiting: MutableMapping[int, _Future], earlier: frozenset[int]) -> None:
    call = next((call for call in list(waiting) if call not in earlier), None)
    question = None if call is None else waiting.get(call)
    if call is None or question is None:
        return
    # An answer that comes after all must find a future, and one that is not done: otherwise vLLM's thread that receives
    # answers dies of it, and with it the engine.
    waiting[call] = _unanswered[handle] = concurrent.futures.Future()
    concurrent.futures.wait([question], _ARRIVAL)
    with suppress(concurrent.futures.InvalidStateError):
        question.set_exception(_NoAnswerError())
