"""Which processes this one has started, also those whose parent has ended and that are nobody's child any more.

A mark in the environment tells: whatever is started inherits it, and ``/proc/PID/environ`` shows what a program was
started with. So it is not seen on a process that was forked and has never started a program, nor where the environment
was taken away or written over (``setproctitle``), unless it was seen before as a descendant.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.processes.proc import ProcessId

VARIABLE = "PYTEST_VLLM_CLEANUP_RUN"
_SEPARATOR = ":"
_YOUNG = 2.0  # seconds in which a process may still be between its fork and its program
_open, _clock = open, time.clock_gettime  # a test may have put something else in their places

_ours: frozenset[ProcessId] = frozenset()
_strangers: frozenset[ProcessId] = frozenset()


@contextmanager
def marked() -> Iterator[None]:
    """Have everything that this process starts meanwhile carry its mark, beside those it carries itself."""
    me, environ = proc.identify(os.getpid()), os.environ
    if me is None:
        yield
        return
    before = environ.get(VARIABLE)
    environ[VARIABLE] = with_mark(_mark_of(me), before)
    try:
        yield
    finally:  # in the environment that was marked: a test may have put another one in its place
        if before is None:
            environ.pop(VARIABLE, None)
        else:
            environ[VARIABLE] = before


def started_by_me() -> frozenset[ProcessId]:
    """Return the running processes that this one has started, and what these have started.

    They are told by descent or by the mark, which each process is asked for once. For measuring only: a process with
    the mark is the run's, but nobody knows what for, so none is ever signalled for it.
    """
    global _ours, _strangers
    seen = proc.everybody()
    me = next((entry.identity for entry in seen if entry.identity.pid == os.getpid()), None)
    if me is None:
        return frozenset()
    below = proc.descendants([me], seen)
    newer = (entry for entry in seen if entry.identity.started >= me.started and not entry.dead)  # others had no mark
    others = {entry.identity for entry in newer} - below - {me}
    lost, strangers = others & _ours, others & _strangers
    for other in others - lost - strangers:
        if _carries(other, _mark_of(me)):
            lost.add(other)
        elif _age(other) > _YOUNG:
            strangers.add(other)
    found = below | lost | proc.descendants(lost, seen) if lost else below
    _ours, _strangers = found, frozenset(strangers)
    return found


def carrying(mark: str, since: ProcessId) -> frozenset[ProcessId]:
    """Return the running processes that were started with a mark of somebody's own among those of ``VARIABLE``.

    Args:
        mark: text that nobody else uses.
        since: the first one that had it.
    """
    newer = (entry for entry in proc.everybody() if entry.identity.started >= since.started and not entry.dead)
    return frozenset(entry.identity for entry in newer if _carries(entry.identity, mark))


def with_mark(mark: str, value: str | None) -> str:
    """Return what ``VARIABLE`` has to be for what carries a mark, beside those that are in its value."""
    return _SEPARATOR.join(dict.fromkeys([*(value.split(_SEPARATOR) if value else []), mark]))


def left_by(process: ProcessId) -> frozenset[ProcessId]:
    """Return the running processes that another one has started, which may have ended, and what these have started.

    They are told by descent, by the mark, or as members of the session, if that process has begun one.
    """
    seen = proc.everybody()
    taken = any(entry.identity.pid == process.pid and entry.identity != process for entry in seen)
    newer = [entry for entry in seen if entry.identity.started >= process.started and not entry.dead]
    found = {
        entry.identity
        for entry in newer
        if entry.identity != process
        and ((entry.session == process.pid and not taken) or _carries(entry.identity, _mark_of(process)))
    }
    return frozenset(found) | proc.descendants({process, *found}, seen)


def _mark_of(process: ProcessId) -> str:
    return f"{process.pid}.{process.started}"


def _carries(process: ProcessId, mark: str) -> bool:
    try:
        with _open(f"/proc/{process.pid}/environ", "rb") as file:
            text = file.read()
    except OSError:  # another user's, or it has just ended
        return False
    name = f"{VARIABLE}=".encode()
    values = [entry.removeprefix(name) for entry in text.split(b"\0") if entry.startswith(name)]
    return any(mark.encode() in value.split(_SEPARATOR.encode()) for value in values)


def _age(process: ProcessId) -> float:
    return _clock(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
