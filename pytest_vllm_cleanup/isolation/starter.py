"""Starts fresh processes for tests, and some of them ahead if that is wanted."""

from __future__ import annotations

import os
import sys
from collections import deque

from pytest_vllm_cleanup.isolation.process import FreshProcess

_WARM = ["torch", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "pytest_vllm_cleanup.isolation.child"]
"""What takes long to import. None of it makes a CUDA context."""

_CHANGES = ("PYTEST_CURRENT_TEST", "PYTEST_VLLM_CLEANUP_RUN")
"""Variables that differ from test to test and that no import reads."""

_PROCESSORS = 4  # for each process that imports beside a test


class Starter:
    """Hands out fresh processes.

    One is started ahead, and where tests are over before the next process has imported what they need, more of them:
    up to one for each four processors that this process has for itself.

    Args:
        shared_output: whether they write to the standard output of this process.
        warm: whether to start some ahead when that is asked for.
        alike: how many processes of this run do the same beside this one, itself included.

    Attributes:
        taken: how many were handed out.
        ahead: how many are started ahead.
    """

    def __init__(self, *, shared_output: bool, warm: bool, alike: int = 1) -> None:
        self.taken = 0
        self.ahead = 1 if warm else 0
        self._most = max(1, len(os.sched_getaffinity(0)) // (_PROCESSORS * alike))
        self._shared_output = shared_output
        self._spares: deque[FreshProcess] = deque()

    def take(self) -> FreshProcess:
        """Return a process that waits for its order: the oldest that was prepared, if it fits, else a new one."""
        self.taken += 1
        while self._spares:
            spare = self._spares.popleft()
            if spare.returncode is None and _lasting(spare.environ) == _lasting(os.environ):
                if not _is_warm(spare):
                    self.ahead = min(self.ahead + 1, self._most)
                return spare
            # What it has imported may have read the environment.
            spare.discard()
        return FreshProcess(shared_output=self._shared_output)

    def prepare(self, wanted: int) -> None:
        """Start processes ahead, if that is wanted; they import what most tests need while the current test runs.

        Args:
            wanted: how many will be taken at most.
        """
        while len(self._spares) < min(self.ahead, wanted):
            spare = FreshProcess(shared_output=self._shared_output)
            spare.send("warm", {"modules": _WARM, "path": list(sys.path)})
            self._spares.append(spare)

    def close(self) -> None:
        """End the processes that nobody needs any more."""
        while self._spares:
            self._spares.popleft().discard()


def _is_warm(spare: FreshProcess) -> bool:
    """Whether a process has imported all that it was to."""
    try:
        return spare.receive(0.0) is not None
    except TimeoutError:
        return False


def _lasting(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _CHANGES}
