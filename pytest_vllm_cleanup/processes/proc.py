"""Processes as Linux shows them under ``/proc``. Where there is no such thing, there are no processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

_DEAD = "ZX"
_open, _listdir = open, os.listdir  # a test may have put something else in their places when its engine is closed


@dataclass(frozen=True, order=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number.

    Attributes:
        pid: number of the process.
        started: when it started, in clock ticks since the machine did (field 22 of ``/proc/PID/stat``).
    """

    pid: int
    started: int


@dataclass(frozen=True)
class Entry:
    """A process as it was seen.

    Attributes:
        identity: which one.
        parent: number of its parent.
        dead: whether it is a zombie, whose memory is gone.
        session: number of the session that it belongs to: of the process that began it.
    """

    identity: ProcessId
    parent: int
    dead: bool
    session: int


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the process that has this number now, None if there is none."""
    entry = _entry(pid)
    return None if entry is None else entry.identity


def is_running(process: ProcessId) -> bool:
    """Return whether a process still runs. A zombie does not: its memory is gone."""
    entry = _entry(process.pid)
    return entry is not None and entry.identity == process and not entry.dead


def everybody() -> list[Entry]:
    """Return all processes that this one can see."""
    try:
        numbers = [int(name) for name in _listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    return [entry for entry in map(_entry, numbers) if entry is not None]


def descendants(roots: Iterable[ProcessId], seen: Iterable[Entry] | None = None) -> frozenset[ProcessId]:
    """Return the children of these processes, their children, and so on, as far as they run.

    A root whose number now belongs to another process has none.

    Args:
        roots: the processes.
        seen: what ``everybody`` has just returned; looked up if None.
    """
    by_parent: dict[int, list[Entry]] = {}
    found: dict[int, ProcessId] = {}
    for entry in everybody() if seen is None else seen:
        by_parent.setdefault(entry.parent, []).append(entry)
        found[entry.identity.pid] = entry.identity
    waiting = [root.pid for root in roots if found.get(root.pid) == root]
    below: set[ProcessId] = set()
    while waiting:
        for child in by_parent.get(waiting.pop(), ()):
            if child.identity not in below and not child.dead:
                below.add(child.identity)
                waiting.append(child.identity.pid)
    return frozenset(below)


def parent(process: ProcessId) -> int | None:
    """Return the number of a process's parent, None if it is gone."""
    entry = _entry(process.pid)
    return entry.parent if entry is not None and entry.identity == process else None


def command(pid: int) -> str:
    """Return the command line of a process, or its name where it hides that; "" if it is gone."""
    for source in ("cmdline", "comm"):
        try:
            with _open(f"/proc/{pid}/{source}", "rb") as file:
                text = file.read()
        except OSError:
            continue
        if words := text.replace(b"\0", b" ").decode(errors="replace").strip():
            return words
    return ""


def _entry(pid: int) -> Entry | None:
    try:
        with _open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # any other error, such as too many open files, does not mean that it is gone
    # The name in parentheses may hold anything, so what follows the last one counts. See proc_pid_stat(5).
    state, parent, *fields = text.rpartition(b")")[2].split()
    threads, started = int(fields[15]), int(fields[17])
    # The first thread may have ended alone; the process then looks like a zombie and lives.
    dead = state.decode() in _DEAD and threads <= 1
    return Entry(ProcessId(pid, started), int(parent), dead, int(fields[1]))
