"""Fresh processes for tests, one of them ahead if that is wanted."""

from __future__ import annotations

import os
import sys

from pytest_vllm_cleanup.isolation.process import FreshProcess

_WARM = ["torch", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine"]
"""What takes long to import. None of it makes a CUDA context."""

_CHANGES = ("PYTEST_CURRENT_TEST", "PYTEST_VLLM_CLEANUP_RUN")
"""Variables that differ from test to test and that no import reads."""


class Starter:
    """Hands out fresh processes.

    Args:
        shared_output: whether they write to the standard output of this process.
        warm: whether to start one ahead when that is asked for.

    Attributes:
        taken: how many were handed out.
    """

    def __init__(self, *, shared_output: bool, warm: bool) -> None:
        self.taken = 0
        self._shared_output = shared_output
        self._warm = warm
        self._spare: FreshProcess | None = None

    def take(self) -> FreshProcess:
        """Return a process that waits for its order: the one that was prepared, if it fits, else a new one."""
        self.taken += 1
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.returncode is None and _lasting(spare.environ) == _lasting(os.environ):
                return spare
            # What it has imported may have read the environment.
            spare.discard()
        return FreshProcess(shared_output=self._shared_output)

    def prepare(self) -> None:
        """Start the next process, if that is wanted; it imports what most tests need while the current test runs."""
        if self._warm and self._spare is None:
            self._spare = FreshProcess(shared_output=self._shared_output)
            self._spare.send("warm", {"modules": _WARM, "path": list(sys.path)})

    def close(self) -> None:
        """End the process that nobody needs any more."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()


def _lasting(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _CHANGES}
