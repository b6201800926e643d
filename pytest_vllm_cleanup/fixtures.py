"""The fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_vllm_cleanup.checks.peak import GpuMemory
    from pytest_vllm_cleanup.devices import VisibleDevice
    from pytest_vllm_cleanup.runners.factory import RunnerFactory

ENGINE_FIXTURES = frozenset({"vllm_runner", "vllm_runner_factory"})


@pytest.fixture
def vllm_runner(request: pytest.FixtureRequest) -> Iterator[RunnerFactory]:
    """Make engines that are closed when the test is over.

    Call it with what ``LLM`` takes, as often as you like, and use the result as it is or in a ``with`` block. Engines
    are closed in reverse order, whether the test passes, fails or skips, also when a constructor raised half-way.
    """
    from pytest_vllm_cleanup.monitor import activate
    from pytest_vllm_cleanup.runners.factory import RunnerFactory
    from pytest_vllm_cleanup.workers import starting

    monitor = activate(request.config)
    factory = RunnerFactory(start_timeout=monitor.settings.start_timeout, defaults=starting.share)
    yield factory
    factory.close()


@pytest.fixture(scope="session")
def vllm_runner_factory(request: pytest.FixtureRequest) -> Iterator[RunnerFactory]:
    """Make engines in fixtures of wider scope, as ``tmp_path_factory`` does for directories.

    An engine made through it belongs to the fixture that made it and is closed when that fixture ends.
    """
    from pytest_vllm_cleanup.monitor import activate
    from pytest_vllm_cleanup.runners.factory import RunnerFactory
    from pytest_vllm_cleanup.workers import starting

    monitor = activate(request.config)
    factory = RunnerFactory(
        monitor.add_finalizer, start_timeout=monitor.settings.start_timeout, defaults=starting.share
    )
    yield factory
    factory.close()


@pytest.fixture
def gpu_memory() -> Iterator[GpuMemory]:
    """Read GPU memory on demand, and its peak since the test started."""
    from pytest_vllm_cleanup.checks.peak import GpuMemory

    with GpuMemory() as memory:
        yield memory


@pytest.fixture
def gpu_devices(request: pytest.FixtureRequest) -> tuple[VisibleDevice, ...]:
    """Return the devices of the test: as many as ``@pytest.mark.gpus(n)`` says, else all that are visible to it."""
    from pytest_vllm_cleanup.workers import turn

    return turn.activate(request.config).given(request.node)


@pytest.fixture
def assert_gpu_released() -> Callable[..., AbstractContextManager[Any]]:
    """Check a part of a test, in a ``with`` block over the call of this fixture's value."""
    from pytest_vllm_cleanup.checks.context import assert_gpu_released

    return assert_gpu_released
