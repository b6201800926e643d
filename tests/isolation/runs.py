"""Inner runs of pytest, each in a folder of its own, and what they said."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

INNER = Path(__file__).with_name("inner")
GONE_WITHIN = 10.0  # seconds
OFF = "--vllm-cleanup-isolate=off"
PYTEST = ("-m", "pytest", "-p", "vllm_cleanup")
_COUNT = re.compile(r"(\d+) ([a-z]+(?: [a-z]+)?)")


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        status: its exit status.
        output: what it printed on its standard output.
        errors: and on its standard error.
        folder: where it ran.
        seconds: how long it took.
        record: what ``inner/recorder.py`` has written down, if it was loaded.
        junit: its JUnit report, if it was asked for one in its folder.
    """

    status: int
    output: str
    errors: str
    folder: Path
    seconds: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    junit: ET.Element | None = None

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of the last line, such as {"passed": 2}; with the singular of "errors" and "warnings"."""
        last = next((line for line in reversed(self.lines) if re.search(r" in \d+\.\d+s", line)), "")
        found = _COUNT.findall(last.partition(" in ")[0])
        return {name.removesuffix("s") if name in ("errors", "warnings") else name: int(n) for n, name in found}

    def line(self, pattern: str) -> str:
        """Return the one line that matches."""
        found = [line for line in self.lines if re.search(pattern, line)]
        assert len(found) == 1, f"{len(found)} lines with {pattern!r}:\n{self.output}\n{self.errors}"
        return found[0]


def untouched() -> dict[str, str]:
    """Return the environment without what tells an inner run of the outer one, or that it is one of a CI system."""
    told = ("PYTEST_", "COV")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(told) and name not in ("CI", "BUILD_NUMBER")
    }


class Folder:
    """A folder with the files of a test suite.

    Args:
        path: where it is; it is empty.
        files: their names with their text.
        copies: names of files in ``inner``.
    """

    def __init__(self, path: Path, files: Mapping[str, str] | None = None, copies: Iterable[str] = ()) -> None:
        self.path = path
        for name, text in (files or {}).items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for name in copies:
            shutil.copy(INNER / name, path / name)

    def start(self, *arguments: str, start: tuple[str, ...] = PYTEST, cwd: str = ".", **environ: str):
        """Start pytest in there."""
        environ = {**untouched(), "COLUMNS": "160", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ}
        return subprocess.Popen(
            [sys.executable, *start, *arguments],
            cwd=self.path / cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(self, *arguments: str, timeout: float = 240, **how: Any) -> Outcome:
        """Run pytest in there."""
        began = time.monotonic()
        how.setdefault("RECORD", str(self.path / "record.json"))
        return self.outcome(self.start(*arguments, **how), began, timeout)

    def outcome(self, process: subprocess.Popen[str], began: float = 0.0, timeout: float = 240) -> Outcome:
        """Wait for a run that was started."""
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            raise AssertionError(f"did not end within {timeout} s:\n{output}\n{errors}") from None
        outcome = Outcome(process.returncode, output, errors, self.path, time.monotonic() - began)
        record, junit = self.path / "record.json", self.path / "junit.xml"
        if record.exists():
            outcome.record = json.loads(record.read_text())
            record.unlink()
        if junit.exists():
            outcome.junit = ET.parse(junit).getroot()
            junit.unlink()
        return outcome


def gone(pids: Iterable[int], within: float = GONE_WITHIN) -> list[int]:
    """Wait until processes are gone. Return those that are not."""
    deadline = time.monotonic() + within
    left = list(pids)
    while (left := [pid for pid in left if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def children(pid: int) -> list[int]:
    """Return the numbers of a process's descendants."""
    with suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
