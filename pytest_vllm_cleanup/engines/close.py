"""The one way out for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_vllm_cleanup.engines import drain, instrument, shells, stop
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry
from pytest_vllm_cleanup.engines.release import require_vllm


def close_engine(engine: Any) -> CloseReport:
    """Close an engine and give back all memory that it holds, in this process or in its child processes.

    Works for an engine made anywhere, also before this package was imported, also for one that is asleep, and
    while other engines of the process go on. Closing an engine that is closed already does nothing.

    Args:
        engine: an ``LLM``, ``LLMEngine`` or ``AsyncLLM``.

    Returns:
        the steps that were taken, with their times in seconds and the errors of those that failed.

    Raises:
        TypeError: the object is not an engine.
    """
    inner = shells.own(engine, "llm_engine") or engine
    kind = _kind_of(inner)
    instrument.install()
    handle = registry.of_engine(inner)
    if handle is None:
        handle = _adopt(kind, inner)
    return close_handle(handle)


def close_handle(handle: EngineHandle) -> CloseReport:
    """Close the engine behind a record; see ``close_engine``."""
    if handle.state is State.CLOSED and handle.report is not None:
        return handle.report
    if handle.in_process is False and handle.state is not State.FAILED:
        return stop.stop(handle)
    return drain.drain(handle)


@contextmanager
def vllm_engine(model: str | None = None, **arguments: Any) -> Iterator[Any]:
    """Build an ``LLM``, and free it on leaving, whatever happened in between.

    Args:
        model: name or path of the model, as for ``LLM``.
        **arguments: further arguments of ``LLM``.

    Yields:
        the ``LLM``.

    Raises:
        UnsupportedVllmError: vLLM is absent or older than 0.11.
    """
    require_vllm()
    instrument.install()
    from vllm import LLM

    arguments = arguments if model is None else {"model": model, **arguments}
    try:
        engine = LLM(**arguments)
        try:
            yield engine
        finally:
            close_engine(engine)
    finally:
        drain.release_unreleased()


def _kind_of(engine: Any) -> str:
    kinds = [base.__name__ for base in type(engine).__mro__ if base.__module__.startswith("vllm.v1.engine")]
    kind = next((name for name in kinds if name in ("LLMEngine", "AsyncLLM")), None)
    if kind is None:
        raise TypeError(
            f"close_engine() takes an LLM, LLMEngine or AsyncLLM of vLLM, not {type(engine).__module__}."
            f"{type(engine).__qualname__}"
        )
    return kind


def _adopt(kind: str, engine: Any) -> EngineHandle:
    """Make a record for an engine that was built unseen."""
    handle = registry.begin(kind)
    instrument.record(handle, engine)
    return handle
