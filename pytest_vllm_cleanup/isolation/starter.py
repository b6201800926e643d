"""Starts fresh processes for tests, and some of them ahead if that is wanted."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import suppress

from pytest_vllm_cleanup.isolation.process import FreshProcess

_WARM = ["torch", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "pytest_vllm_cleanup.isolation.child"]
"""What takes long to import. None of it makes a CUDA context."""

_CHANGES = ("PYTEST_CURRENT_TEST", "PYTEST_VLLM_CLEANUP_RUN")
"""Variables that differ from test to test and that no import reads."""

_PROCESSORS = 4  # for each process that imports beside a test
_MOST = 4  # each takes half a GiB of host memory


class Starter:
    """Hands out fresh processes.

    One is started ahead. Where tests are over before the next process has imported what they need, it is one more the
    next time, and one less again where all are ready early: at most four, and one for each four processors that this
    process has for itself.

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
        self._most = min(_MOST, max(1, len(os.sched_getaffinity(0)) // (_PROCESSORS * alike)))
        self._shared_output = shared_output
        self._spares: deque[_Spare] = deque()

    def take(self) -> FreshProcess:
        """Return a process that waits for its order: the oldest that was prepared, if it fits, else a new one."""
        self.taken += 1
        for spare in self._spares:
            spare.look()
        while self._spares:
            spare = self._spares.popleft()
            if spare.fits():
                self._adapt(spare)
                return spare.process
            # What it has imported may have read the environment.
            spare.process.discard()
            self.ahead = 1  # where environments differ from test to test, the others are in vain
        return FreshProcess(shared_output=self._shared_output)

    def _adapt(self, taken: _Spare) -> None:
        if not taken.is_warm:
            self.ahead = min(self.ahead + 1, self._most)
        elif self._spares and all(spare.is_warm for spare in self._spares):
            self.ahead = max(self.ahead - 1, 1)

    def prepare(self, wanted: int) -> None:
        """Start processes ahead, if that is wanted; they import what most tests need while the current test runs.

        Args:
            wanted: how many will be taken at most.
        """
        while len(self._spares) < min(self.ahead, wanted):
            self._spares.append(_Spare(FreshProcess(shared_output=self._shared_output)))

    def close(self) -> None:
        """End the processes that nobody needs any more."""
        while self._spares:
            self._spares.popleft().process.discard()


class _Spare:
    """A process that was started ahead."""

    def __init__(self, process: FreshProcess) -> None:
        self.process = process
        self.is_warm = False
        self._is_gone = False
        process.send("warm", {"modules": _WARM, "path": list(sys.path)})

    def look(self) -> None:
        """See whether it has imported all that it was to, and whether it still runs."""
        with suppress(TimeoutError):  # it imports
            if not self.is_warm:
                self.is_warm = self.process.receive(0.0) is not None
                self._is_gone = not self.is_warm

    def fits(self) -> bool:
        """Whether a test may have it."""
        if self._is_gone or self.process.returncode is not None:
            return False
        return _lasting(self.process.environ) == _lasting(os.environ)


def _lasting(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _CHANGES}
