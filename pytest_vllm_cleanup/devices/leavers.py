"""Processes that are about to end on a device, and give their CUDA contexts back when they have.

They stand in a file, which is written and read by who has the device's lock for starts. No lock would tell of the end
itself: the system lets those of a process go before the driver has its memory back (0.1 to 0.2 s before were seen).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..processes import proc
from ..processes.proc import ProcessId

_LIMIT = 30.0  # seconds since a process has said that it ends; it may hang
_PAUSE = 0.02


def announce(file: Path) -> None:
    """Say that this process is about to end."""
    me = proc.identify(os.getpid())
    if me is not None:
        with file.open("a", encoding="ascii") as lines:
            lines.write(f"{me.pid} {me.started} {time.monotonic()}\n")


def see_off(file: Path) -> None:
    """Wait until those who have said so have ended, or their time is over, and forget them."""
    for process, since in _listed(file):
        while process.pid != os.getpid() and proc.is_running(process) and time.monotonic() - since < _LIMIT:
            time.sleep(_PAUSE)
    file.unlink(missing_ok=True)


def _listed(file: Path) -> Iterator[tuple[ProcessId, float]]:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        pid, started, since = line.split()
        yield ProcessId(int(pid), int(started)), float(since)
