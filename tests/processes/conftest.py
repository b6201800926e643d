"""Real processes that stand for those of an engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from programs import PATIENT

from pytest_vllm_cleanup.processes import proc, reap, tree
from pytest_vllm_cleanup.processes.proc import ProcessId


class Running:
    """A process that has printed its first line."""

    def __init__(self, popen: subprocess.Popen[str], line: str) -> None:
        self.popen = popen
        self.line = line
        identity = proc.identify(popen.pid)
        assert identity is not None
        self.identity: ProcessId = identity


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Start a Python program, and end it with the test."""
    with ExitStack() as stack:

        def start(code: str = PATIENT) -> Running:
            popen = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(popen)
            stack.callback(popen.kill)
            assert popen.stdout is not None
            running = Running(popen, popen.stdout.readline())
            stack.callback(lambda: reap.send_all(tree.family([running.identity]), signal.SIGKILL))
            return running

        yield start
