"""Processes seen from outside, and runs of pytest that are looked at in this way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from common import LIMIT, LOOK, QUIET

HERE = Path(__file__).resolve().parent
INNER = HERE / "inner"
# These belong to a test run and not to one of its engines, and end with it.
_OF_THE_RUN = ("multiprocessing.resource_tracker", "pytest_vllm_cleanup")


class Process(NamedTuple):
    """A process, told by when it started from a later one of the same number."""

    pid: int
    started: int  # clock ticks since the machine's start

    @property
    def command(self) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return ""

    def runs(self) -> bool:
        """Whether it still runs. A zombie does not."""
        now = _status(self.pid)
        return now is not None and now.process == self and now.runs

    def kill(self) -> None:
        """Kill it, and no other process of its number."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.runs():
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


class _Status(NamedTuple):
    process: Process
    parent: int
    session: int
    runs: bool


def _status(pid: int | str) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent, _, session, *rest = text.rpartition(")")[2].split()
    return _Status(Process(int(pid), int(rest[15])), int(parent), int(session), state not in "ZXx")


class Family:
    """A process, its children, their children and so on, and all that are in its session.

    Read from /proc alone, so that it knows nothing of what the plugin believes.

    Args:
        root: the process that everything starts with.
    """

    def __init__(self, root: int) -> None:
        first = _status(root)
        self._root = root
        self.members: set[Process] = set() if first is None else {first.process}

    def look(self) -> set[Process]:
        """Return those that run, and remember those that are new."""
        table = [status for name in os.listdir("/proc") if name.isdigit() and (status := _status(name))]  # noqa: PTH208
        pids = {status.process.pid for status in table if status.process in self.members}
        new = [status for status in table if status.process not in self.members]
        while met := [s for s in new if s.parent in pids or s.session == self._root]:
            self.members |= {status.process for status in met}
            pids |= {status.process.pid for status in met}
            new = [status for status in new if status.process not in self.members]
        return {status.process for status in table if status.process in self.members and status.runs}

    def gone(self, since: float, limit: float = LIMIT, *, but: Callable[[Process], bool] | None = None) -> float | None:
        """Wait until none of them runs any more, except some.

        Args:
            since: the monotonic clock's time from which to count.
            limit: seconds from then on.
            but: whether one may go on.

        Returns:
            how many seconds that took; None if it was not so at the end.
        """
        while True:
            left = [process for process in self.look() if but is None or not but(process)]
            seconds = time.monotonic() - since
            if not left:
                return seconds
            if seconds >= limit:
                return None
            time.sleep(LOOK)

    def kill(self) -> None:
        """Kill those that still run."""
        for process in self.look():
            process.kill()


@dataclass
class Run:
    """A run of pytest in a session of its own, with the plugin.

    Attributes:
        folder: an empty folder for what it writes.
        process: pytest itself.
        family: pytest and all that it has started.
        began: when it was started, by the monotonic clock.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    family: Family
    began: float

    def notes(self) -> list[dict[str, Any]]:
        """Return what it has noted so far: see inner/diary.py."""
        with contextlib.suppress(FileNotFoundError):
            # The last line may be in the middle of being written.
            lines = (self.folder / "diary").read_text(encoding="utf-8").split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    @property
    def pids(self) -> set[int]:
        """The numbers of all processes that were seen."""
        return {process.pid for process in self.family.members}

    def noted(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """Return the first note of an event, None if there is none yet."""
        for note in self.notes():
            if note["event"] == event and facts.items() <= note.items():
                return note
        return None

    def watch(self, until: Callable[[], object], limit: float = 300.0) -> bool:
        """Watch it until something is so, or it has ended, or it has taken too long.

        Returns:
            whether it was so.
        """
        deadline = time.monotonic() + limit
        while not (so := until()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return bool(until())
            self.family.look()
            time.sleep(LOOK)
        return bool(so)

    def engines_gone(self, since: float) -> float | None:
        """Wait until all processes of its engines have ended, while it may go on itself; see Family.gone."""
        return self.family.gone(since, but=self.of_the_run)

    def of_the_run(self, process: Process) -> bool:
        """Whether a process is pytest or one of its helpers, and not of an engine."""
        return process.pid == self.process.pid or any(name in process.command for name in _OF_THE_RUN)

    def go(self, test: str) -> None:
        """Let it go on after a test, where it has BENCHMARK_HOLD seconds to wait for that."""
        (self.folder / f"go_{test}").touch()

    def output(self) -> str:
        """Return what it printed."""
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def pytest_run(folder: Path, test: str, environ: dict[str, str], *arguments: str) -> Iterator[Run]:
    """Run a test of the folder inner, and end all that is left of it in the end.

    Args:
        folder: a new folder for what it writes.
        test: "file.py" or "file.py::test".
        environ: further environment variables.
        *arguments: further arguments of pytest.
    """
    folder.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    installed = any(point.name == "vllm_cleanup" for point in metadata.entry_points(group="pytest11"))
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider"]
    command += ["-p", "vllm_cleanup" if installed else "pytest_vllm_cleanup.plugin", "-p", "diary"]
    command += [f"--rootdir={INNER}", f"--confcutdir={INNER}", "-c", str(folder / "pytest.ini")]
    paths = [str(INNER), os.environ.get("PYTHONPATH", ""), str(HERE.parent)]
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, str(INNER / test)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **QUIET,
                **environ,
                "BENCHMARK_FOLDER": str(folder),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
            cwd=folder,
            start_new_session=True,
        )
    run = Run(folder, process, Family(process.pid), began)
    try:
        yield run
    finally:
        run.family.kill()
        process.kill()
        process.wait()
