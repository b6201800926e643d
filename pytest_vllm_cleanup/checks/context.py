"""The same check for a part of a test, or outside pytest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pytest_vllm_cleanup.checks import investigate, message
from pytest_vllm_cleanup.checks.check import ReleaseCheck
from pytest_vllm_cleanup.devices.names import parse_devices
from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.drain import release_unreleased, still_alive
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory.units import parse_duration, parse_size


class GpuMemoryLeakError(AssertionError):
    """GPU memory has not come back."""


@contextmanager
def assert_gpu_released(
    tolerance: int | str | None = None,
    timeout: float | str = 60.0,
    devices: Iterable[int | str] | int | str | None = None,
    strict: bool = False,
) -> Iterator[ReleaseCheck]:
    """Assert that what happens inside the block gives all its GPU memory back.

    Engines that are built inside and still alive at the end are leaks; they are not closed.

    Args:
        tolerance: memory that may stay, in bytes or as text ("8 MiB"); None: the default of the meter.
        timeout: how long to wait for memory to come back, in seconds or as text ("2 min").
        devices: which devices count, such as 0, "cuda:1" or a list; None for all visible ones.
        strict: whether memory that cannot be measured is an error too.

    Raises:
        GpuMemoryLeakError: memory stayed, with the numbers; or, if ``strict``, it could not be measured. An exception
            from inside the block goes first: nothing is checked then.
        ValueError: a size, time or device cannot be parsed, or a device is not visible.
    """
    instrument.install()
    check = ReleaseCheck(
        tolerance=None if tolerance is None else parse_size(tolerance),
        timeout=parse_duration(timeout),
        devices=None if devices is None else parse_devices(devices),
    )
    known = {handle.number for handle in registry.handles()}
    yield check
    release_unreleased()
    alive = still_alive([handle for handle in registry.handles() if handle.number not in known])
    result = check.finish(alive)
    if result.leaked:
        with guarded("looking for who holds the memory of the block"):
            result = investigate.explain(check, result, alive)
        raise GpuMemoryLeakError(f"{message.sentence('the block', result)}\n{message.evidence(result)}")
    if strict and result.outcome == "unknown":
        raise GpuMemoryLeakError(message.not_measured("the block", result))
