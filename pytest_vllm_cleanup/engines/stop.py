"""Ending an engine's child processes: ask, wait, and end what is left of them, in bounded time."""

from __future__ import annotations

import inspect
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pytest_vllm_cleanup.engines import environ, measure, shells
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry
from pytest_vllm_cleanup.processes import reap, tree
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

_GRACE = 10.0  # seconds for vLLM's own shutdown where it takes a limit, after it, and again after SIGTERM
_LIMIT = 30.0  # seconds until vLLM's own shutdown, hanging, has its processes killed
_DRIVER = 10.0  # seconds for the driver to drop processes that are gone


def stop(handle: EngineHandle) -> CloseReport:
    """Close an engine whose model lives in child processes.

    Only processes recorded for it, and what these have started, are ever signalled; they are known by number and start
    time. When this is interrupted, by a second Ctrl-C or a time limit, they are killed at once.

    Returns:
        what each stage did, and how long it took in seconds.
    """
    report = CloseReport()
    try:
        with registry.closing(handle, report):
            were_listed = measure.lists(handle.processes)
            report.run("shut it down", _shut_down, handle)
            end_processes(handle, report, were_listed)
    except BaseException:
        kill(handle)
        raise
    if (engine := handle.part("engine")) is not None:
        shells.sever(engine, str(handle))
    environ.give_back(handle)
    registry.closed(handle, report)
    return report


def end_processes(handle: EngineHandle, report: CloseReport, were_listed: bool = False) -> None:
    """Wait for an engine's processes; SIGTERM once, then SIGKILL, those that do not go by themselves.

    Then wait until the driver has dropped them: it gives memory back some time after a process has ended.

    Args:
        handle: the engine. One that failed to start is not waited for.
        report: where the stages are noted.
        were_listed: whether the driver listed them while they ran.
    """
    if handle.processes:
        try:
            _end(handle, report, were_listed)
        except OSError as problem:  # too many open files, say: they are left to the watchdog
            report.steps.append(("end its processes", 0.0, f"{type(problem).__name__}: {problem}"))


def _end(handle: EngineHandle, report: CloseReport, were_listed: bool) -> None:
    left = family(handle)
    patience = 0.0 if handle.state is State.FAILED else _GRACE
    report.run("wait for its processes", reap.wait, left, patience)
    if left():
        report.run("terminate its processes", left.terminate, _GRACE)
    if left():
        report.run("kill its processes", _kill, left)
    with suppress(Exception):
        multiprocessing.active_children()  # fetches the exit status of those that have ended: none stays as a zombie
    report.run("wait for the driver", measure.wait_until_dropped, handle.processes, were_listed, _DRIVER)
    if not left():
        current_watchdog().forget(handle.number)


def family(handle: EngineHandle) -> reap.Family:
    """Return the processes of an engine, to be looked at again and again."""
    # The watchdog has also seen what they started later, and whose parent may have died since.
    return reap.Family(handle.processes | current_watchdog().known(handle.number))


def kill(handle: EngineHandle) -> None:
    """Kill an engine's processes, and do not wait."""
    reap.send_all(family(handle)(), signal.SIGKILL)


@contextmanager
def limited(handle: EngineHandle) -> Iterator[None]:
    """Kill an engine's processes if what is done here, vLLM's own shutdown, hangs: it waits for nothing else.

    Raises:
        TimeoutError: that was necessary.
    """
    fired = threading.Event()

    def end() -> None:
        fired.set()
        kill(handle)

    timer = threading.Timer(_LIMIT, end)
    timer.daemon = True
    if handle.processes:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if fired.is_set():
        raise TimeoutError(f"vLLM's own shutdown did not return within {_LIMIT:g} s, and its processes were killed")


def _shut_down(handle: EngineHandle) -> None:
    engine = handle.part("engine")
    if engine is None:
        return
    # AsyncLLM has a shutdown of its own, LLMEngine only that of its client.
    shutdown = engine.shutdown if hasattr(type(engine), "shutdown") else engine.engine_core.shutdown
    with limited(handle):
        if "timeout" in inspect.signature(shutdown).parameters:  # from 0.18
            shutdown(timeout=_GRACE)
        else:
            shutdown()


def _kill(left: reap.Family) -> None:
    stuck = left()
    names = tree.describe(stuck)
    reap.send_all(stuck, signal.SIGKILL)
    if survivors := reap.wait(left, _GRACE):
        raise TimeoutError(f"still running {_GRACE:g} s after SIGKILL: {tree.describe(survivors)}")
    raise TimeoutError(f"had not ended {_GRACE:g} s after SIGTERM, and were killed: {names}")
