"""Processes, seen from outside: all that one has started, also after they have lost their parent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

# These belong to the test run and not to an engine, and end with it.
_OF_THE_RUN = ("multiprocessing.resource_tracker", "pytest_vllm_cleanup.processes import guardian")


@dataclass
class Seen:
    """When a process was seen running.

    Attributes:
        process: number and start time of it, which psutil compares.
        first: when it was first seen, in seconds since the epoch.
        last: when it was last seen running.
        command: its command line, or the title that it gave itself.
    """

    process: psutil.Process
    first: float
    last: float
    command: str = ""

    @property
    def of_engine(self) -> bool:
        """Whether it may not outlive the test that started it."""
        return not any(name in self.command for name in _OF_THE_RUN)

    def __str__(self) -> str:
        return f"{self.process.pid} ({self.command[:60]})"


class Family:
    """A process, its children, their children, and so on.

    What is started and orphaned between two looks is not seen.

    Args:
        root: the process that everything starts with.
    """

    def __init__(self, root: int) -> None:
        self._members: dict[psutil.Process, Seen] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            self._meet(psutil.Process(root))

    def pids(self) -> set[int]:
        """Return the numbers of all that were seen."""
        return {process.pid for process in self._members}

    def look(self) -> None:
        """Look who runs, and whom they have started since."""
        running = [seen.process for seen in self._members.values() if _runs(seen.process)]
        for process in running:
            self._meet(process)
        for process in running:
            with contextlib.suppress(psutil.Error):
                if process.ppid() not in {other.pid for other in running}:
                    for child in process.children(recursive=True):
                        self._meet(child)

    def members(self, besides: Collection[int] = ()) -> list[Seen]:
        """Return all that have been seen, except some."""
        return [seen for seen in self._members.values() if seen.process.pid not in besides]

    def left(self, besides: Collection[int] = ()) -> list[Seen]:
        """Return those that still run, except some. A zombie does not run."""
        return [seen for seen in self.members(besides) if _runs(seen.process)]

    def _meet(self, process: psutil.Process) -> None:
        now = time.time()
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            seen = self._members.setdefault(process, Seen(process, now, now))
            seen.last, seen.command = now, command.strip() or seen.command


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
