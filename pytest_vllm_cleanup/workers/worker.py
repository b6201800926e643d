"""A worker's part: it makes sure of its device, and takes ports and caches of its own."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from pytest_vllm_cleanup.config import Settings
from pytest_vllm_cleanup.devices.sharing import is_shared
from pytest_vllm_cleanup.guard import guarded, warn
from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.stash import SETTINGS
from pytest_vllm_cleanup.workers.orders import PREDECESSOR, Orders, orders_of

NAME = "vllm_cleanup_worker"
PROBLEM = "vllm_cleanup_problem"
"""Where a worker says in its output why the run cannot go on."""
RESTART = "vllm_cleanup_restart"
"""Where a worker that wants to be replaced says why: in its output, and on the last report before it ends."""


class Worker:
    """Registered in workers of pytest-xdist that were given a device, replace another one, or may be replaced."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._problem = ""
        self._ports: object = None  # held as long as the worker lives
        settings, orders = config.stash[SETTINGS], orders_of(config)
        replaced: list[int] | None = getattr(config, "workerinput", {}).get(PREDECESSOR)
        if replaced is not None:
            with guarded("waiting for the memory of the worker that is replaced"):
                from pytest_vllm_cleanup.workers import predecessor

                predecessor.wait_until_gone((replaced[0], replaced[1]), alone=not is_shared(os.environ))
        if orders is not None:
            self._problem = _overwritten(orders)
            self._arrive(settings, orders)

    def _arrive(self, settings: Settings, orders: Orders) -> None:
        if settings.caches == "worker":
            with guarded("giving this worker caches of its own"):
                from pytest_vllm_cleanup.devices.caches import caches_of

                os.environ.update(caches_of(orders.rank, os.environ))
        with guarded("giving this worker ports of its own"):
            self._take_ports()

    def _take_ports(self) -> None:
        from pytest_vllm_cleanup.devices import ports
        from pytest_vllm_cleanup.engines.release import installed_release

        reserved = ports.reserve()
        if reserved is None:
            warn("giving this worker ports of its own", RuntimeError("all ranges are taken"))
            return
        self._ports = reserved
        for name, value in reserved.environment(installed_release()).items():
            os.environ.setdefault(name, value)  # a port that the user has set stays

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """End the run where a device was taken away from the worker. Earlier, nobody would tell the controller why."""
        if self._problem:
            output_of(session.config)[PROBLEM] = self._problem
            raise session.Failed(self._problem)
        return (yield)

    # Inside that of pytest-xdist, which tells the controller that this worker has finished.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Have a worker that is replaced give its memory back when no sibling starts an engine.

        It is told to go as soon as it has finished. Any other one stays until all have.
        """
        try:
            return (yield)
        finally:
            if RESTART in output_of(self._config) and not session.shouldfail:
                from pytest_vllm_cleanup import leaving
                from pytest_vllm_cleanup.workers import starting

                engines = self._config.pluginmanager.get_plugin(leaving.NAME)
                if isinstance(engines, leaving.Leaving):
                    engines.close_engines()
                starting.leave()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell the controller with the last report of the test that this worker wants to be replaced."""
        if report.when == "teardown" and (reason := output_of(self._config).get(RESTART)):
            setattr(report, RESTART, reason)


def output_of(config: pytest.Config) -> dict[str, object]:
    """Return what a worker gives its controller when it ends."""
    output: dict[str, object] = getattr(config, "workeroutput", {})
    return output


def ask_for_restart(session: pytest.Session, reason: str) -> None:
    """Have this worker end after the running test, and be replaced."""
    if session.config.pluginmanager.has_plugin(NAME):
        me = proc.identify(os.getpid())
        output_of(session.config).update({RESTART: reason, PREDECESSOR: [os.getpid(), me.started if me else 0]})
        session.shouldstop = reason


def _overwritten(orders: Orders) -> str:
    for name, value in orders.offer.environment([orders.home]).items():
        now = os.environ.get(name)
        if now != value:
            return (
                f"this worker was given {name}={value}, and something has made it {now!r} since, such as a "
                "conftest.py that hands out GPUs by itself. Leave the variable alone, or run with "
                "--vllm-cleanup-gpus=off and a number of workers."
            )
    return ""
