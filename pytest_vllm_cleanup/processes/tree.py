"""Which processes belong to an engine: those recorded for it, and all that these have started since."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.processes.proc import ProcessId

# These belong to Python's multiprocessing and to the whole session, and end with whoever started them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def family(recorded: Iterable[ProcessId]) -> frozenset[ProcessId]:
    """Return those of the recorded processes that still run, and all their descendants.

    A recorded process whose number now belongs to another process counts as gone, and so do that one's children.
    """
    running = {process for process in recorded if proc.is_running(process)}
    if not running:
        return frozenset()
    found = running | proc.descendants(running)
    return frozenset(process for process in found if process.pid != os.getpid() and not _is_helper(process))


def roots(processes: frozenset[ProcessId]) -> frozenset[ProcessId]:
    """Return those whose parent is not among them."""
    numbers = {process.pid for process in processes}
    return frozenset(process for process in processes if proc.parent(process) not in numbers)


def describe(processes: Iterable[ProcessId]) -> str:
    """Return what people call these processes: number and command of each."""
    return ", ".join(f"{process.pid} ({proc.command(process.pid)[:60] or 'ended'})" for process in sorted(processes))


def _is_helper(process: ProcessId) -> bool:
    command = proc.command(process.pid)
    return any(helper in command for helper in _HELPERS)
