"""Seeing every engine at the moment it is constructed, whoever constructs it.

A post-import hook wraps the constructors of ``LLMEngine`` and ``AsyncLLM`` (and ``EngineCore.shutdown``) when
vLLM is imported. vLLM is not imported for it; a process that never imports vLLM pays nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from operator import methodcaller
from typing import Any

import wrapt

from pytest_vllm_cleanup.diagnosis import heap
from pytest_vllm_cleanup.engines import children, drain, printing, shells, siblings, traces
from pytest_vllm_cleanup.engines.errors import DeviceQuarantinedError
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry
from pytest_vllm_cleanup.guard import guarded

_ENGINES = (("vllm.v1.engine.llm_engine", "LLMEngine"), ("vllm.v1.engine.async_llm", "AsyncLLM"))
_CORE = ("vllm.v1.engine.core", "EngineCore")
_PRINTED = ("vllm.entrypoints.llm", "LLM.__repr__")
_START_UP = ("vllm.v1.engine.utils", "zmq_socket_ctx")
_installed = False
_environ_before: ContextVar[dict[str, str] | None] = ContextVar("environ_before", default=None)


def install() -> None:
    """Start recording engines. Works before and after vLLM was imported; calling it again does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for module, name in _ENGINES:
        _when_imported(module, f"{name}.from_engine_args", _configure)
        _when_imported(module, f"{name}.__init__", _construct)
    _when_imported(_CORE[0], f"{_CORE[1]}.shutdown", _shut_down_core)
    _when_imported(*_PRINTED, printing.show)
    _when_imported(*_START_UP, _let_interrupts_through)
    with guarded("looking for engines that were built before"):
        for engine in _existing():
            record(registry.begin(type(engine).__name__), engine)


def _existing() -> list[Any]:
    """Return the engines of this process. One built by a conftest would die with the process groups of the next."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _ENGINES]
    classes = [kind for kind in found if isinstance(kind, type)]
    if not classes:
        return []
    # By the identity of its type: comparing, or isinstance(), would run code of objects that are none of our business.
    return heap.instances(id(kind) for base in classes for kind in heap.with_subclasses(base))


def _when_imported(module: str, target: str, wrapper: Callable[..., Any]) -> None:
    def patch(imported: Any) -> None:
        # In the middle of somebody's import: what is no vLLM but stands for one, or for a part of it, must not fail.
        with guarded(f"watching {module}.{target}"):
            wrapt.wrap_function_wrapper(imported, target, wrapper)

    wrapt.register_post_import_hook(patch, module)


def _let_interrupts_through(
    wrapped: Callable[..., AbstractContextManager[Any]], _none: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[Any]:
    return _interruptible(wrapped(*args, **kwargs))


@contextmanager
def _interruptible(manager: AbstractContextManager[Any]) -> Iterator[Any]:
    # In here vLLM waits for its engine core to start, swallows Ctrl-C (0.11 to 0.33), and waits again, for minutes.
    interrupt = None
    with manager as value:
        try:
            yield value
        except KeyboardInterrupt as problem:
            interrupt = problem
            raise
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            interrupt = None  # its traceback has this frame


def _configure(wrapped: Callable[..., Any], _class: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Making the configuration already writes environment variables, some of which change how later engines run. What
    # an earlier one wrote is taken back first, or it would be taken from this one.
    with guarded("looking before an engine is configured"):
        drain.release_unreleased()
    token = _environ_before.set(dict(os.environ))
    try:
        return wrapped(*args, **kwargs)
    finally:
        _environ_before.reset(token)


def _construct(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    __tracebackhide__ = methodcaller("errisinstance", DeviceQuarantinedError)  # by pytest, only where we raised it
    before = None
    with guarded("looking before an engine is built"):
        drain.release_unreleased()  # while the new one does not count as a live sibling yet
        before = traces.look(_environ_before.get())
    handle = registry.begin(type(instance).__name__)
    with ExitStack() as turn:
        try:
            registry.wait_to_start(handle, turn)
            registry.tell("before_build", handle)
            registry.ask_gates(handle, args[0] if args else kwargs.get("vllm_config"))
            with siblings.during_build(handle), children.recorded(handle):
                wrapped(*args, **kwargs)
        except BaseException as problem:
            handle.failure = f"{type(problem).__name__}: {problem}"
            with guarded(f"taking {handle} apart, which failed to start"):
                _failed(handle, before, instance)
            raise
        finally:
            registry.tell("after_build", handle)
    with guarded(f"recording {handle}"):
        record(handle, instance, before)


def record(handle: EngineHandle, engine: Any, before: traces.Before | None = None) -> None:
    """Complete the record of an engine that has been built.

    Args:
        handle: its record.
        engine: the ``LLMEngine`` or ``AsyncLLM``.
        before: the process as it was before, None if nobody looked then.
    """
    siblings_before = registry.siblings(handle)
    if before is not None:
        handle.traces = traces.difference(before)
    else:
        children.adopt(handle, engine)
    if siblings_before:
        # What the process was like before engines came is what the first of them saw.
        handle.traces.inherit(siblings_before[0].traces)
    registry.attach(handle, engine)
    core = shells.core_of(engine)
    handle.in_process = core is not None
    if core is not None:
        handle.parts.update(shells.weak(shells.chain(core)))
        registry.attach_core(handle, core)
    handle.sleeps = bool(shells.own(shells.own(engine, "model_config"), "enable_sleep_mode"))
    handle.state = State.LIVE


def _failed(handle: EngineHandle, before: traces.Before | None, engine: Any) -> None:
    # The exception's frames hold the half-built engine as long as anybody holds the exception. So it is taken
    # apart now; what needs those frames gone (collection, caches) follows at the next safe moment.
    handle.state = State.FAILED
    if before is not None:
        handle.traces = traces.difference(before)
    parts = shells.chain_in_traceback(sys.exc_info()[2])
    handle.in_process = bool(parts)
    handle.parts.update(shells.weak({"engine": engine, **parts}))
    if (core := parts.get("core")) is not None:
        registry.attach_core(handle, core)
    report = CloseReport()
    drain.take_apart(handle, report)
    handle.report = report


def _shut_down_core(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    handle = registry.of_core(instance)
    if handle is None:
        wrapped(*args, **kwargs)  # the core of a child process, which has the process to itself
        return
    drain.release_hooks(handle)
    with siblings.during_shutdown(handle):
        wrapped(*args, **kwargs)
