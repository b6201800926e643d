"""One inner run of pytest: what is to happen to it, and what became of it. Plain data."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from .bystanders import Bystander
from .family import Seen

GONE_WITHIN = 10.0  # seconds
IN_PROCESS, IN_CHILDREN = "in process", "child processes"
MODES = (IN_PROCESS, IN_CHILDREN)


@dataclass(frozen=True)
class Blow:
    """A signal that is sent once the run notes something.

    Attributes:
        event: what is to be noted.
        number: the signal.
        group: whether all processes of the run's group get it, as from a terminal; else the one that noted it.
    """

    event: str
    number: signal.Signals
    group: bool = False


@dataclass(frozen=True)
class Run:
    """What is to happen.

    Attributes:
        death: in a few words.
        mode: where the engines live.
        suite: the tests to run, as on the command line.
        statuses: the exit statuses that are right; none: any.
        arguments: further ones for pytest.
        blows: what hits it, in this order.
        started: whether an engine is built before.
        bystander: whether a process that looks like an engine runs beside it, in its process group and session.
        seconds: about how long it takes; the longest begin first.
    """

    death: str
    mode: str
    suite: str
    statuses: tuple[int, ...] = (0,)
    arguments: tuple[str, ...] = ()
    blows: tuple[Blow, ...] = ()
    started: bool = True
    bystander: bool = False
    seconds: float = 20

    def __str__(self) -> str:
        return f"{self.death}, {self.mode}"


@dataclass
class Fate:
    """What became of a run.

    Attributes:
        run: which one.
        began: when it was started, in seconds since the epoch.
        ended: when pytest itself had ended.
        status: its exit status, negative for a signal; None if it did not end and was killed.
        diary: what it noted, in order.
        family: all its processes that were seen.
        left: those that still ran ``GONE_WITHIN`` seconds after the end, one phrase each.
        peak: the most that its processes were seen to hold on the device; None if there is none to ask.
        stayed: bytes that they still held then; None likewise.
        bystanders: the processes beside it, just before they were ended.
        output: what it printed.
    """

    run: Run
    began: float
    ended: float = 0.0
    status: int | None = None
    diary: list[dict[str, Any]] = field(default_factory=list)
    family: list[Seen] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    peak: int | None = None
    stayed: int | None = None
    bystanders: list[Bystander] = field(default_factory=list)
    output: str = ""

    def events(self, event: str, test: str | None = None) -> list[dict[str, Any]]:
        """Return what was noted under a name, of all tests or of one."""
        return [note for note in self.diary if note["event"] == event and test in (None, note.get("test"))]

    def engines(self, since: float = 0.0, until: float = float("inf")) -> int:
        """Return how many engines were built and used."""
        return sum(since <= note["time"] <= until for note in self.events("engine"))

    @property
    def seconds_until_gone(self) -> float:
        """From the end of pytest to that of its last process, or to the end of looking."""
        return max(0.0, *(seen.last - self.ended for seen in self.family))

    def problems(self) -> list[str]:
        """Return what is wrong with it, one sentence each."""
        wrong = []
        if self.status is None:
            wrong.append("it did not end and was killed")
        elif self.run.statuses and self.status not in self.run.statuses:
            wrong.append(f"exit status {self.status}, expected {' or '.join(map(str, self.run.statuses))}")
        if self.run.started and not self.engines():
            wrong.append("no engine was built")
        if missed := [blow.event for blow in self.run.blows if not self.events(blow.event)]:
            wrong.append(f"never came to {', '.join(missed)}")
        if self.left:
            wrong.append(f"left running {GONE_WITHIN:g} s later: {', '.join(self.left)}")
        if self.stayed:
            wrong.append(f"{self.stayed} bytes stayed on the device")
        if self.peak == 0 and self.engines():
            wrong.append("an engine was built, and the driver never listed its process")
        for bystander in self.bystanders:
            if not bystander.alive:
                wrong.append(f"bystander {bystander.pid} was killed")
            if bystander.received:
                wrong.append(f"bystander {bystander.pid} got {', '.join(bystander.received)}")
        return wrong
