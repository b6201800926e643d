"""Has the engines of workers start and end one after the other on a device, each with its share of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_vllm_cleanup.devices.sharing import WORKER, sharers
from pytest_vllm_cleanup.engines import deadline
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.registry import EngineHandle, registry
from pytest_vllm_cleanup.runners import budget

if TYPE_CHECKING:
    from pytest_vllm_cleanup.devices.starts import StartLocks


def install() -> Callable[[], None]:
    """Take the start locks from now on, in a worker of pytest-xdist or below one.

    Returns:
        what undoes it.
    """
    if WORKER not in os.environ:
        return lambda: None
    from pytest_vllm_cleanup.devices.starts import StartLocks

    locks = StartLocks(_devices)
    registry.listeners.insert(0, locks)  # before those who measure
    outer, registry.turn = registry.turn, partial(_turn, locks)  # this run may be one inside another

    def undo() -> None:
        registry.listeners.remove(locks)
        registry.turn = outer

    return undo


@contextmanager
def _turn(locks: StartLocks, _handle: EngineHandle) -> Iterator[None]:
    with ExitStack() as stack:
        with deadline.suspended():  # another engine may be about to start, which is not to blame
            stack.enter_context(locks.closing())
        yield


def _devices() -> list[str]:
    """Return the names of the devices that this process sees; none for host memory."""
    return [reading.identity for reading in current_gauge().read().values() if reading.identity is not None]


def share(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments for an engine, which keep it within the share of this worker.

    Args:
        arguments: what the test says.
    """
    workers = sharers(os.environ) or 1
    return budget.defaults(arguments, current_gauge().read().values(), workers) if workers > 1 else {}
