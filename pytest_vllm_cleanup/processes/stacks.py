"""Where a process hangs: Python's faulthandler prints the stacks of all threads when it is aborted."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from pytest_vllm_cleanup.processes import proc, reap, tree
from pytest_vllm_cleanup.processes.proc import ProcessId

_SWITCH = "PYTHONFAULTHANDLER"
_WAIT = 2.0  # seconds for a process to print its stacks and end
_LONGEST = 8000  # characters of one process; the end of a stack says where it hangs, and comes first


@contextmanager
def printed_on_abort() -> Iterator[None]:
    """Have Python processes that are started meanwhile print their stacks when they crash or are aborted."""
    before = os.environ.get(_SWITCH)
    os.environ.setdefault(_SWITCH, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SWITCH, None)


def abort(processes: Iterable[ProcessId]) -> list[tuple[str, str]]:
    """End processes by SIGABRT, the youngest first, and collect the stacks that they print.

    Returns:
        for each (what it is called, its stacks). Where its standard error is no file, such as a terminal, the stacks
        are there, and the text says so.
    """
    found = []
    for process in sorted(processes, key=lambda process: (process.started, process.pid), reverse=True):
        name, errors = tree.describe([process]), f"/proc/{process.pid}/fd/2"
        written = _size(errors)
        # Opened before the end: the file may be deleted already, and the link goes with the process.
        with suppress(OSError):
            descriptor = None if written is None else os.open(errors, os.O_RDONLY)
            try:
                end_by_abort(process)
                found.append((name, _read(descriptor, written or 0)))
            finally:
                if descriptor is not None:
                    os.close(descriptor)
    return found


def end_by_abort(process: ProcessId) -> None:
    """End a process by SIGABRT and wait a moment for it; its faulthandler, if enabled, prints its stacks."""
    with suppress(OSError, ValueError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # no memory image of a whole engine on the disk
    reap.send(process, signal.SIGABRT)
    reap.wait(lambda: frozenset(filter(proc.is_running, [process])), _WAIT)


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # a link to a file that may have no name any more
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read(descriptor: int | None, start: int) -> str:
    if descriptor is None:
        return "(on its standard error)"
    text = os.pread(descriptor, _LONGEST, start).decode(errors="replace").strip()
    return text or "(it printed none)"
