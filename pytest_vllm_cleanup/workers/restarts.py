"""The controller's part of ``--vllm-cleanup-on-leak=restart``: a worker that asks for it is replaced, and nothing else.

pytest-xdist replaces a worker that has crashed, and calls the test that it ran a failure. A worker that leaked ends in
order instead, right after that test's reports. What is done for a crash is then done here without the crash: the
tests that were meant for it go back, and a worker of the same description is started.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version

from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.workers.orders import PREDECESSOR
from pytest_vllm_cleanup.workers.worker import RESTART

NAME = "vllm_cleanup_restarts"
_OLDEST = Version("3.6")


def require_xdist() -> None:
    """Raise ``pytest.UsageError`` where pytest-xdist is too old: before 3.6 no worker ends before its last test."""
    version = metadata.version("pytest-xdist")
    if Version(version) < _OLDEST:
        raise pytest.UsageError(
            f"--vllm-cleanup-on-leak=restart needs pytest-xdist {_OLDEST} or later, and {version} is installed; "
            "upgrade it, or use quarantine, fail or exit"
        )


class Restarts:
    """Registered in the controller of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._scheduler: Any = None
        self._complete: Any = None
        self._leaving: dict[Any, int | None] = {}
        self._gone: set[Any] = set()
        self._replaced: list[tuple[Any, object]] = []

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_xdist_make_scheduler(self) -> Generator[None, Any, Any]:
        """Keep tests from being sent to a worker that is about to end."""
        scheduler = yield
        self._scheduler, self._complete = scheduler, scheduler.mark_test_complete
        give_back = scheduler.remove_pending_tests_from_node

        def mark_test_complete(node: Any, item_index: int, duration: float = 0) -> None:
            if node in self._leaving:
                # Whoever crashes has not completed a test, and that one alone is not given to another worker.
                self._leaving[node] = item_index
            else:
                self._complete(node, item_index, duration)

        def remove_pending_tests_from_node(node: Any, indices: Any) -> None:
            if node not in self._gone:  # what it had has gone back already
                give_back(node, indices)

        if hasattr(scheduler, "_removed2pending"):
            _let_replace_often(scheduler)
        scheduler.mark_test_complete = mark_test_complete
        scheduler.remove_pending_tests_from_node = remove_pending_tests_from_node
        return scheduler

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note who wants to be replaced."""
        node = getattr(report, "node", None)
        if node is not None and getattr(report, RESTART, None):
            self._leaving.setdefault(node, None)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Replace a worker that has ended because it wanted to."""
        if node in self._leaving and error is None:
            with guarded(f"replacing worker {node.gateway.id}"):
                self._replace(node)

    def _replace(self, node: Any) -> None:
        output: dict[str, Any] = node.workeroutput
        reason = output.pop(RESTART, None)
        session = self._config.pluginmanager.get_plugin("dsession")
        if reason is None or session is None or output.get("shouldfail"):
            return  # the run ends anyway, as with -x
        output["shouldstop"] = False  # else it would end now
        self._replaced.append((node.gateway.spec, output.get(PREDECESSOR)))
        self._take_tests_back(node)
        node.gateway.exit()  # or its process would stay, and keep the memory
        if session.shouldstop or not self._anything_left():
            return
        session.report_line(f"\nreplacing worker {node.gateway.id}: {reason}")
        session.shuttingdown = False
        session._clone_node(node)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker whom it replaces, so that it waits for that one's memory."""
        for spec, process in self._replaced:
            if spec is node.gateway.spec:
                node.workerinput[PREDECESSOR] = process

    def _take_tests_back(self, node: Any) -> None:
        self._gone.add(node)
        index = self._leaving[node]
        if index is not None and hasattr(self._scheduler, "assigned_work"):
            # Those that spread by scope would run it again with the rest of its scope.
            self._complete(node, index, 0)
        if node in self._scheduler.nodes:
            self._scheduler.remove_node(node)

    def _anything_left(self) -> bool:
        # With --dist=each, tests of a worker that has left wait for its replacement alone.
        return bool(self._scheduler.has_pending or getattr(self._scheduler, "_removed2pending", None))


def _let_replace_often(scheduler: Any) -> None:
    """Mend what ``--dist=each`` of pytest-xdist (3.8) does not expect: several replacements, and replacements of them.

    It forgets which tests a replacement has, and wants to start one that has not told them yet.
    """
    add, start = scheduler.add_node_collection, scheduler.schedule

    def add_node_collection(node: Any, collection: Any) -> None:
        add(node, collection)
        scheduler.node2collection.setdefault(node, list(collection))

    def schedule() -> None:
        early = [node for node in scheduler.node2pending if node not in scheduler.node2collection]
        for node in early:
            del scheduler.node2pending[node]
        try:
            start()
        finally:
            scheduler.node2pending.update({node: [] for node in early})

    scheduler.add_node_collection, scheduler.schedule = add_node_collection, schedule
