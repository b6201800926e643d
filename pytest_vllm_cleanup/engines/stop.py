"""Stopping an engine whose model lives in child processes: ask, wait, and end what is left of its own processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from pytest_vllm_cleanup.engines import shells, traces
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry
from pytest_vllm_cleanup.engines.traces import ProcessId

_GRACE = 10.0  # seconds after vLLM's own shutdown, and again after SIGTERM
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def stop(handle: EngineHandle) -> CloseReport:
    """Stop one engine in child processes, and wait until the processes recorded at its construction are gone.

    Only processes recorded then, and identified by number and start time, are ever signalled.
    """
    report = CloseReport()
    handle.state = State.CLOSING
    report.run("shut it down", _ask, handle)
    report.run("wait for its processes", end_processes, handle)
    if (engine := handle.part("engine")) is not None:
        shells.sever(engine, str(handle))
    traces.restore_environ(handle.traces.environ)
    registry.closed(handle, report)
    return report


def end_processes(handle: EngineHandle) -> None:
    """Wait for the processes recorded at construction; SIGTERM, then SIGKILL, those that do not go by themselves.

    Raises:
        TimeoutError: one of them is still running after SIGKILL.
    """
    survivors = _wait(_living(handle.traces.children))
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in survivors:
            with suppress(psutil.NoSuchProcess):
                end(process)
        survivors = _wait(survivors)
    multiprocessing.active_children()  # fetches the exit status of those that have ended: none stays as a zombie
    if survivors:
        numbers = ", ".join(str(process.pid) for process in survivors)
        raise TimeoutError(f"still running after SIGKILL: {numbers}")


def _ask(handle: EngineHandle) -> None:
    engine = handle.part("engine")
    if engine is None:
        return
    if hasattr(type(engine), "shutdown"):
        engine.shutdown()  # AsyncLLM
    else:
        engine.engine_core.shutdown()


def _living(recorded: Iterable[ProcessId]) -> list[psutil.Process]:
    living = []
    for identity in recorded:
        with suppress(psutil.Error):
            process = psutil.Process(identity.pid)
            if process.create_time() == identity.started and not _is_helper(process):
                living.append(process)
    return living


def _is_helper(process: psutil.Process) -> bool:
    # These belong to Python's multiprocessing and to the whole session, not to the engine.
    return any(helper in argument for argument in process.cmdline() for helper in _HELPERS)


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + _GRACE
    while processes and time.monotonic() < deadline:
        processes = [process for process in processes if _runs(process)]
        if processes:
            time.sleep(0.02)
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        # A zombie's memory is gone, unless it is only the first thread that has ended.
        return bool(process.is_running()) and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False
