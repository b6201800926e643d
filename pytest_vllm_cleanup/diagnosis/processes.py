"""Processes that hold memory, as a person wants to hear of them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pytest_vllm_cleanup.memory.units import format_size
from pytest_vllm_cleanup.processes import marks, proc

_LONGEST = 80  # characters of a command line
_now = time.time  # a test may have stopped it


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process that holds memory.

    Attributes:
        pid: its number.
        name: what it is called; "" if it cannot be had, as for a process in another container.
        command: its command line, shortened.
        age: seconds since it started, None if that cannot be had.
        bytes: what it holds on the device, None where the driver does not say.
        parent: whose child it is, "" if that cannot be had.
        orphan: whether it was started here and its parent has ended since.
        engine: the engine to which it belongs, "" if to none that was seen.
        running: whether it still ran when it was looked at.
    """

    pid: int
    name: str
    command: str
    age: float | None
    bytes: int | None
    parent: str
    orphan: bool
    engine: str
    running: bool

    def __str__(self) -> str:
        if not self.running:
            return f"process {self.pid}, which has ended or is hidden from here"
        parts = [f"process {self.pid}"]
        if self.name:
            parts[0] += f" ({self.name})"
        if self.bytes is not None:
            parts.append(f"with {format_size(self.bytes)}")
        if self.engine:
            parts.append(f"of {self.engine}")
        if self.age is not None:
            parts.append(f"started {self.age:.1f} s ago" if self.age < 60 else f"started {self.age / 60:.0f} min ago")
        if self.orphan:
            parts.append("whose parent has ended")
        elif self.parent:
            parts.append(f"child of {self.parent}")
        text = ", ".join(parts)
        return f"{text}: {self.command}" if self.command else text


def describe(
    pids: Iterable[int], bytes_by_pid: Mapping[int, int | None], engines: Mapping[int, str]
) -> list[ProcessFacts]:
    """Return what is known of some processes, the biggest first.

    Args:
        pids: their numbers.
        bytes_by_pid: what each holds on the device, where known.
        engines: what to call the engine to which a process belongs.
    """
    ours = {os.getpid(), *engines, *(process.pid for process in marks.started_by_me())}
    facts = [_facts(pid, bytes_by_pid.get(pid), engines, ours) for pid in dict.fromkeys(pids)]
    return sorted(facts, key=lambda fact: (-(fact.bytes or 0), fact.pid))


def _facts(pid: int, size: int | None, engines: Mapping[int, str], ours: Collection[int]) -> ProcessFacts:
    import psutil  # type: ignore[import-untyped, unused-ignore]

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name = str(process.name())
            running = process.status() != psutil.STATUS_ZOMBIE
            age: float | None = max(0.0, _now() - process.create_time())
            parent = process.ppid()
    except psutil.Error:
        name, running, age, parent = "", False, None, 0
    return ProcessFacts(
        pid=pid,
        name=name,
        command=_shortened(proc.command(pid)),
        age=age,
        bytes=size,
        parent=_called(parent, engines),
        orphan=pid in ours and pid != os.getpid() and parent not in ours,
        engine=engines.get(pid, ""),
        running=running,
    )


def _called(pid: int, engines: Mapping[int, str]) -> str:
    if pid == os.getpid():
        return "this process"
    command = proc.command(pid) if pid > 0 else ""
    if not command:
        return ""
    of = f" of {engines[pid]}" if pid in engines else ""
    return f"process {pid}{of} ({_shortened(command)})"


def _shortened(command: str) -> str:
    command = " ".join(command.split())
    if len(command) <= _LONGEST:
        return command
    # The program stands at the front and the script's arguments at the end.
    half = (_LONGEST - 5) // 2
    return f"{command[:half]} ... {command[-half:]}"
