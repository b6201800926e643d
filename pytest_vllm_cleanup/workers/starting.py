"""Has the engines of workers start and end one after the other on a device, each with its share of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_vllm_cleanup.devices.sharing import WORKER, sharers
from pytest_vllm_cleanup.engines import deadline
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.registry import EngineHandle, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory.meters import processes
from pytest_vllm_cleanup.runners import budget

if TYPE_CHECKING:
    from pytest_vllm_cleanup.devices.starts import StartLocks

T = TypeVar("T")


def install() -> Callable[[], None]:
    """Take the start locks from now on, in a worker of pytest-xdist or below one.

    Returns:
        what undoes it.
    """
    if WORKER not in os.environ:
        return lambda: None
    outer, registry.turns = registry.turns, _Turns(_locks())  # this run may be one inside another

    def undo() -> None:
        registry.turns = outer

    return undo


def leave() -> None:
    """Wait until no sibling starts an engine, and have none start until this process has ended with what it holds.

    It returns at once without a CUDA context and an engine, or outside a run with workers. To be called where the
    process ends at once, not where it stays until all workers have finished. An interrupt ends the waiting.
    """
    if WORKER in os.environ:
        with guarded("waiting for its turn to end"), suppress(KeyboardInterrupt):
            if processes.holds_context() or any(registry.handles()):
                _locks().leave()


class _Turns:
    """The start locks, for engines."""

    def __init__(self, locks: StartLocks) -> None:
        self._locks = locks

    @contextmanager
    def starting(self, handle: EngineHandle) -> Iterator[None]:
        with _uncounted(self._locks.starting()) as handle.waited:
            yield

    @contextmanager
    def closing(self, _handle: EngineHandle) -> Iterator[None]:
        with _uncounted(self._locks.closing()):
            yield


@contextmanager
def _uncounted(turn: AbstractContextManager[T]) -> Iterator[T]:
    """Take a turn, for which an engine that starts, or is about to when this one is closed, is not to blame."""
    with ExitStack() as stack:
        with deadline.suspended():
            value = stack.enter_context(turn)
        yield value


@cache  # one for this process, which never waits for itself
def _locks() -> StartLocks:
    from pytest_vllm_cleanup.devices.starts import StartLocks

    return StartLocks(_devices)


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
