"""The child processes of an engine: recorded from their first moment, and told to the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_vllm_cleanup.engines import shells, traces
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.processes import births, proc
from pytest_vllm_cleanup.processes.proc import ProcessId
from pytest_vllm_cleanup.processes.watchdog import current_watchdog


@contextmanager
def recorded(handle: EngineHandle) -> Iterator[None]:
    """Record the processes that are started for an engine while it is being built.

    Those that a thread starts which was there before, other than the one that builds, are somebody else's: a server of
    the test, or the processes of a second engine.
    """
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    foreign: set[ProcessId] = set()
    before: frozenset[ProcessId] | None = None

    def born(pid: int) -> None:
        child = proc.identify(pid)
        if child is None or pid == current_watchdog().pid:
            return
        thread = threading.get_ident()
        builders = {other.thread for other in registry.others(handle) if other.state is State.BUILDING}
        if thread in others or (thread != handle.thread and thread in builders):
            foreign.add(child)
        else:
            add(handle, [child])

    with guarded("looking before an engine is built"):
        current_watchdog().ensure()
        before = traces.children()
    try:
        with births.observed(born):
            yield
    finally:
        with guarded(f"recording the processes of {handle}"):
            if before is not None:
                # Beside those whose start was seen: theirs, and those that no Python code started.
                theirs = {process for other in registry.others(handle) for process in other.processes}
                strangers = foreign | theirs
                add(handle, traces.children() - before - strangers - proc.descendants(strangers))


def adopt(handle: EngineHandle, engine: Any) -> None:
    """Record the processes of an engine that was built unseen, from vLLM's own list of them."""
    client = shells.own(engine, "engine_core")
    manager = shells.own(shells.own(client, "resources"), "engine_manager")
    cores = [proc.identify(process.pid) for process in shells.own(manager, "processes") or () if process.pid]
    known = [core for core in cores if core is not None]
    add(handle, [*known, *proc.descendants(known)])


def add(handle: EngineHandle, processes: Iterable[ProcessId]) -> None:
    """Add to an engine's processes."""
    new = frozenset(processes)
    handle.processes |= new
    if new:
        current_watchdog().add(handle.number, new)
