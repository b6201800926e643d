"""A Python of its own in which engines are built, so that pytest's process stays free of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_HERE = Path(__file__).parent
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
IN_CHILD_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# The processes of engines run nothing of ours, and import vLLM a third more slowly where coverage looks on.
CHILDREN_UNMEASURED = """
import os
for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
    del os.environ[name]
"""


class ScenarioError(AssertionError):
    """A scenario raised, or did not end in time; the text has its output."""


class Lab:
    """One interpreter that plays scenarios: functions of test modules that take and return plain data.

    It is started at the first scenario, and again after one that failed. Several scenarios share it, because
    importing vLLM takes longer than building an engine.
    """

    def __init__(self, output: Path, environ: Mapping[str, str] | None = None) -> None:
        self._output = output
        self._environ = {**os.environ, **_ENVIRONMENT, **(environ or {})}
        self._process: subprocess.Popen[str] | None = None
        self._answers = -1

    def __call__(self, scenario: Callable[..., Any], *arguments: Any, timeout: float = 180.0) -> Any:
        """Play a scenario and return what it returned, as JSON carries it."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        task = {
            "file": scenario.__code__.co_filename,
            "name": scenario.__name__,
            "arguments": [str(argument) if isinstance(argument, Path) else argument for argument in arguments],
        }
        written = self._output.stat().st_size
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._read(timeout)
        if "error" not in answer:
            return answer["result"]
        self.stop(grace=0)
        text = self._output.read_bytes()[written:].decode(errors="replace")
        raise ScenarioError(f"{scenario.__name__}: {answer['error']}\n--- its output ---\n{text[-6000:]}")

    def stop(self, grace: float = 20.0) -> None:
        """End the interpreter and whatever it has started."""
        if self._process is None:
            return
        process, self._process = self._process, None
        family = descendants(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        kill(family)
        process.kill()
        process.wait()
        os.close(self._answers)

    def _start(self) -> None:
        self._answers, write = os.pipe()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(_HERE / "lab_main.py"), str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                pass_fds=(write,),
                text=True,
            )
        os.close(write)

    def _read(self, timeout: float) -> dict[str, Any]:
        deadline, data = time.monotonic() + timeout, b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return {"error": f"no answer within {timeout:g} s"}
            piece = os.read(self._answers, 65536)
            if not piece:
                return {"error": "the interpreter died"}
            data += piece
        answer: dict[str, Any] = json.loads(data)
        return answer


@dataclass
class InnerRun:
    """What an inner pytest run said.

    Attributes:
        status: its exit status.
        output: all that it printed.
        outcomes: the words behind each test's name in verbose output, in order: ["PASSED", "LEAKED"].
    """

    status: int
    output: str
    outcomes: dict[str, list[str]] = field(default_factory=dict)

    def section(self, name: str) -> str:
        """Return what is printed about one test in the sections about failures, errors and leaks."""
        found = re.search(
            rf"^_+ (?:ERROR at \w+ of )?(?:\w+[.:]+)*{name} _+$(.*?)(?=^[_=]{{4,}} )", self.output, re.M | re.S
        )
        return found.group(1) if found else ""

    def leaked_mib(self, name: str) -> float:
        """Return how much a test is said to have left, in MiB."""
        found = re.search(r"left [\d.]+ [KMG]iB \((\d+) bytes\)", self.section(name))
        return int(found.group(1)) / 2**20 if found else 0.0


def run_pytest(folder: Path, source: str, environ: Mapping[str, str] | None = None, timeout: float = 300) -> InnerRun:
    """Run tests in a pytest of their own.

    Args:
        folder: an empty folder.
        source: text of the test module.
        environ: further environment variables.
        timeout: seconds until the run is given up.
    """
    (folder / "test_inner.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    with (folder / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write(CHILDREN_UNMEASURED)
    output = folder / "output.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "-p", "no:cacheprovider", "--color=no", str(folder)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, "COLUMNS": "120", **(environ or {})},
            cwd=folder,
        )
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        family = descendants(process.pid)
        process.kill()
        kill(family)
        raise ScenarioError(f"no end within {timeout:g} s\n{output.read_text()[-6000:]}") from None
    text = output.read_text(encoding="utf-8", errors="replace")
    return InnerRun(status, text, _outcomes(text))


def _outcomes(text: str) -> dict[str, list[str]]:
    outcomes: dict[str, list[str]] = {}
    # Between a test's name and its outcome stands whatever it wrote past pytest's capture.
    for name, rest in re.findall(r"^test_\w+\.py::(?:\w+::)?(\w+)(.*?)(?=^test_\w+\.py::|^=)", text, re.M | re.S):
        outcomes.setdefault(name, []).extend(re.findall(r"\b(PASSED|FAILED|SKIPPED|ERROR|LEAKED)\b", rest))
    return outcomes


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started, and those that they have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def lab(folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[Lab]:
    """Provide a lab, and stop it in the end."""
    output = folder / "lab.txt"
    output.touch()
    made = Lab(output, environ)
    try:
        yield made
    finally:
        made.stop()
