"""The gauge of this process, which knows the processes of its engines as its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from pytest_vllm_cleanup.devices.sharing import is_shared
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.memory import HOST, Gauge, Reading, choose_gauge
from pytest_vllm_cleanup.memory.meters.nvml import NvmlMeter
from pytest_vllm_cleanup.memory.meters.processes import is_helper
from pytest_vllm_cleanup.processes import marks, proc
from pytest_vllm_cleanup.processes.proc import ProcessId
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

_PAUSE = 0.02  # seconds between two readings
_FLAT = 0.2  # seconds without a change, where nothing else can be known

_gauges: dict[int, Gauge] = {}


def current_gauge() -> Gauge:
    """Return the gauge of this process; chosen at the first call, by what the machine and vLLM are."""
    me = os.getpid()
    if me not in _gauges:
        _gauges[me] = choose_gauge(our_processes, shared=partial(is_shared, os.environ))
    return _gauges[me]


@contextmanager
def seeing(environ: Mapping[str, str]) -> Iterator[None]:
    """Measure the devices that an environment shows, instead of those that this process was started with.

    Args:
        environ: what processes inherit that are started meanwhile.
    """
    gauge = current_gauge()
    before = gauge.meters
    gauge.meters = tuple(
        NvmlMeter(environ, widened=True) if isinstance(meter, NvmlMeter) else meter for meter in before
    )
    try:
        yield
    finally:
        gauge.meters = before


def our_processes() -> frozenset[int]:
    """Return the ids of this process, of all that it has started, and of its engines' recorded processes, as they run.

    To be measured, not to be signalled: what a test has started beside its engines is the test's to end.
    """
    recorded = {child.pid for handle in registry.handles() for child in handle.processes if proc.is_running(child)}
    started = {child.pid for child in marks.started_by_me()} - {current_watchdog().pid}
    return frozenset({os.getpid(), *recorded, *(pid for pid in started if not is_helper([proc.command(pid)]))})


def lists(processes: Iterable[ProcessId]) -> bool:
    """Return whether an accelerator lists one of these processes, which are running now."""
    pids = {process.pid for process in processes if proc.is_running(process)}
    return any(use.pid in pids for reading in _accelerators() for use in reading.processes or ())


def wait_until_dropped(
    processes: Iterable[ProcessId], were_listed: bool, timeout: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until no accelerator lists processes that have ended; the driver drops them some time later.

    Where it does not tell our processes (in some containers), it is waited until the device's memory has been flat for
    a while. Host memory needs no waiting: it is back when a process has ended.

    Args:
        processes: the processes.
        were_listed: whether the driver listed them while they ran, so that it will tell when it has dropped them.
        timeout: how long to wait, in seconds.
        clock: the time in seconds. Bound here, since a test may have stopped the clock when its engine is closed.

    Raises:
        TimeoutError: one is still listed; the text names it and the device.
    """
    gone = {process.pid for process in processes}
    deadline = clock() + timeout
    last: list[int] = []
    flat_since = clock()
    while True:
        readings = _accelerators()
        listed = {
            f"{use.pid} on {reading.device}"
            for reading in readings
            for use in reading.processes or ()
            if (were_listed or reading.listed) and use.pid in gone
        }
        tells = were_listed or all(reading.listed for reading in readings)
        hidden = [] if tells else [reading.used for reading in readings if reading.used is not None]
        now = clock()
        if hidden != last:
            last, flat_since = hidden, now
        if not listed and (not hidden or now - flat_since >= _FLAT):
            return
        if now >= deadline:
            break
        time.sleep(_PAUSE)
    if listed:
        raise TimeoutError(f"{timeout:g} s after their end the driver still lists {', '.join(sorted(listed))}")


def _accelerators() -> list[Reading]:
    meters = [meter for meter in current_gauge().meters if meter.name != HOST]
    ours = our_processes() if meters else frozenset()
    return [reading for meter in meters for reading in meter.read(ours).values()]
