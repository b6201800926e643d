"""The child processes of an engine: recorded from their first moment, and told to the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_vllm_cleanup.engines import shells
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.processes import births, proc, tree
from pytest_vllm_cleanup.processes.proc import ProcessId
from pytest_vllm_cleanup.processes.watchdog import current_watchdog


@contextmanager
def recorded(handle: EngineHandle) -> Iterator[None]:
    """Record the processes that are started for an engine while it is being built.

    These are the ones that the building thread starts, or a thread that it has started, and what they start themselves.
    All others are somebody else's: of a server of the test, of a thread that was there before, or of a second engine.
    """
    here = threading.current_thread()
    others = frozenset(threading.enumerate()) - {here}

    def born(pid: int, line: frozenset[threading.Thread]) -> None:
        if current_watchdog().is_starting:
            return
        builders = {other.thread for other in registry.others(handle) if other.state is State.BUILDING}
        thread = threading.get_ident()
        if thread != here.ident and (thread in builders or (here not in line and not others.isdisjoint(line))):
            return
        child = proc.identify(pid)
        if child is not None:
            add(handle, [child])

    with guarded("starting the watchdog"):
        current_watchdog().ensure()
    try:
        with births.observed(born):
            yield
    finally:
        with guarded(f"recording the processes of {handle}"):
            known, handle.processes = handle.processes, frozenset()
            add(handle, tree.family(known))  # not the compilers and the like, which have ended


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
