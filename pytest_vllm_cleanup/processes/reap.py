"""Ending processes: exactly these, and waiting until they are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from pytest_vllm_cleanup.processes import proc, tree
from pytest_vllm_cleanup.processes.proc import ProcessId

_PAUSE = 0.01  # seconds between two looks


def send(process: ProcessId, number: int) -> bool:
    """Send a signal to exactly this process.

    It is held by a file descriptor while its identity is checked, so that even a number which is given away at this
    moment cannot hit another process. (Kernels before 5.3 have no such descriptor, and gVisor has not always.)

    Returns:
        whether it was sent; not if the process is gone or is another user's.
    """
    descriptor = _open(process.pid)
    try:
        if not proc.is_running(process):
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def send_all(processes: Iterable[ProcessId], number: int) -> None:
    """Send a signal to each of these processes."""
    for process in processes:
        send(process, number)


def wait(
    current: Callable[[], frozenset[ProcessId]],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> frozenset[ProcessId]:
    """Wait until no process is left.

    Args:
        current: gives those that still run.
        timeout: seconds until it is given up.
        clock: the time in seconds. Bound here, since a test may have stopped the clock when its engine is closed.
        sleep: waits so many seconds.

    Returns:
        those that still run; empty if all are gone.
    """
    deadline = clock() + timeout
    left = current()
    while left and clock() < deadline:
        sleep(_PAUSE)
        left = current()
    return left


class Family:
    """The processes of one engine while they are being ended: what they start meanwhile belongs to them.

    Args:
        known: the processes to begin with.
    """

    def __init__(self, known: Iterable[ProcessId]) -> None:
        self._known = set(known)

    def __call__(self) -> frozenset[ProcessId]:
        """Return those that still run."""
        running = tree.family(self._known)
        self._known |= running
        return running

    def terminate(self, grace: float) -> frozenset[ProcessId]:
        """Ask them once to end, by SIGTERM, and return those that still run after so many seconds.

        Workers follow their engine core; a signal of their own would cut their farewell short.
        """
        send_all(tree.roots(self()), signal.SIGTERM)
        return wait(self, grace)

    def end(self, grace: float) -> None:
        """Ask them once to end, kill those that do not within so many seconds, and wait as long for these."""
        if self() and self.terminate(grace):
            send_all(self(), signal.SIGKILL)
            wait(self, grace)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # gone, or a kernel or a Python without it
        return None
