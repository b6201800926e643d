"""A worker that replaces another one waits until that one's memory is back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.memory import HOST
from pytest_vllm_cleanup.memory.units import MIB
from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.processes.proc import ProcessId

_LIMIT = 90.0  # seconds in all; the watchdog gives engines five after SIGTERM, and the driver takes its time
_FLAT = 1.0  # seconds without a change after which memory of a process that has ended comes back no more
_PAUSE = 0.1
_GRAIN = MIB


def wait_until_gone(
    predecessor: tuple[int, int],
    *,
    alone: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a worker has ended, its watchdog has ended its engines, and the driver has dropped them.

    Args:
        predecessor: number and start of its process.
        alone: whether the device is this worker's alone, so that the device's figure tells.
        clock: seconds that only grow.
        sleep: waits for so many seconds.
    """
    deadline = clock() + _LIMIT
    while clock() < deadline and _lives(predecessor):
        sleep(_PAUSE)
    last, since = None, clock()
    while clock() < deadline:
        used, listed = _device(predecessor[0])
        now = clock()
        if used != last:
            last, since = used, now
        if not listed and (not alone or used is None or now - since >= _FLAT):
            return
        sleep(_PAUSE)


def _lives(predecessor: tuple[int, int]) -> bool:
    """Whether it runs, or somebody who ends its engines does."""
    return proc.is_running(ProcessId(*predecessor)) or any(
        _is_watchdog_of(predecessor[0], proc.command(entry.identity.pid))
        for entry in proc.everybody()
        if not entry.dead and entry.identity.pid != os.getpid()
    )


def _is_watchdog_of(pid: int, command: str) -> bool:
    # As the watchdog starts its helper: program, descriptor, number of whom it guards, place of the package.
    return "guardian.main" in command and f" {pid} " in command


def _device(pid: int) -> tuple[tuple[int, ...] | None, bool]:
    """Return the MiB in use on this worker's devices, and whether the driver still lists a process."""
    readings = [reading for name, reading in current_gauge().read().items() if name != HOST]
    used = tuple(reading.used // _GRAIN for reading in readings if reading.used is not None)
    listed = any(use.pid == pid for reading in readings if reading.listed for use in reading.processes or ())
    return used or None, listed
