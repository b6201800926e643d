"""Runs isolated tests in processes of their own, inside the normal protocol of the test run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_vllm_cleanup import leaving, markers
from pytest_vllm_cleanup.config import Settings
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.isolation import posing, remembered
from pytest_vllm_cleanup.isolation.attempt import Attempt
from pytest_vllm_cleanup.isolation.repeaters import REPEATERS
from pytest_vllm_cleanup.isolation.starter import Starter
from pytest_vllm_cleanup.report.carried import ISOLATED
from pytest_vllm_cleanup.stash import MONITOR, SETTINGS

NAME = "vllm_cleanup_isolator"
_RUN = pytest.StashKey["_Run"]()
_STARTUP = 120.0  # seconds for a process to start and import, beside the time that pytest-timeout gives the test


# What needs the terminal, or shows what is done in this process.
_REFUSED = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "setupshow": "--setup-show",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
}


def activate(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Have the isolated ones among these tests run in processes of their own.

    Returns:
        whether there are any.

    Raises:
        pytest.UsageError: an option of the run cannot work for them.
    """
    isolator = Isolator(config, remembered.leaked_before(config))
    number = isolator.count(items)
    if number == 0:
        return False
    refused = [option for name, option in _REFUSED.items() if config.getoption(name, False)]
    if refused:
        what = "1 isolated test" if number == 1 else f"{number} isolated tests"
        raise pytest.UsageError(
            f"{' and '.join(refused)}: cannot be used with the {what} of this run; "
            "--vllm-cleanup-isolate=off runs all tests in this process"
        )
    # SIGTERM to this process has that of a test end in order. Before this one, which ends its spare process first.
    leaving.activate(config)
    config.pluginmanager.register(isolator, NAME)
    return True


class Isolator:
    """Has each isolated test run elsewhere.

    Whatever runs a test's phases here (pytest, or a plugin that repeats tests) goes on to do so. But for an isolated
    test its hooks for the phases reach this plugin alone, which waits for the report of a fresh process, and the plugin
    that measures memory, so that what outlives the process is a leak. All other plugins see the phases in that process.

    Args:
        config: the run's.
        leaked_before: ids of tests that leaked in an earlier run and are isolated therefore.
    """

    def __init__(self, config: pytest.Config, leaked_before: frozenset[str]) -> None:
        self._settings: Settings = config.stash[SETTINGS]
        self._leaked_before = leaked_before
        self._starter = Starter(
            shared_output=config.getoption("capture") == "no",
            warm=self._settings.isolate_warm,
            alike=getattr(config, "workerinput", {}).get("workercount", 1),
        )
        self._left = 0
        self._next_is_isolated = False
        self._workerinput: dict[str, Any] | None = None

    def wants(self, item: pytest.Item) -> bool:
        """Return whether a test runs in a process of its own."""
        if self._settings.isolate == "off":
            return False
        if self._settings.isolate == "all" or item.nodeid in self._leaked_before:
            return True
        return item.get_closest_marker(markers.ISOLATED) is not None

    def count(self, items: list[pytest.Item]) -> int:
        """Count the isolated tests of a run, and prepare for so many."""
        self._left = sum(map(self.wants, items))
        return self._left

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        if not self.wants(item):
            with guarded("ending the spare process for isolated tests"):
                self._starter.close()  # a test of this process may look at its children, or wait for them
            return (yield)
        self._left -= 1
        self._next_is_isolated = nextitem is not None and self.wants(nextitem)
        with _Run(item, self._settings, self._attempt).instead():
            return (yield)

    # The phases of an isolated test

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (run := item.stash.get(_RUN, None)) is not None:
            run.setup()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if (run := item.stash.get(_RUN, None)) is not None:
            run.call()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if (run := item.stash.get(_RUN, None)) is not None:
            run.teardown(nextitem)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        run = item.stash.get(_RUN, None)
        return None if run is None else run.report(call)

    # pytest-timeout counts in the other process, where it knows what hangs.
    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        run = item.stash.get(_RUN, None)
        if run is None:
            return None
        run.limit(settings.timeout + _STARTUP)
        return True

    def pytest_unconfigure(self) -> None:
        with guarded("ending the spare process for isolated tests"):
            self._starter.close()

    def _attempt(self, item: pytest.Item, timeout: float | None) -> Attempt:
        attempt = Attempt(item, self._starter.take(), timeout)
        if item.nodeid in self._leaked_before:
            attempt.notes.append("ran in a process of its own, because it leaked in an earlier run")
        factory = getattr(item.config, "_tmp_path_factory", None)
        if self._workerinput is None:  # plugins may make something for a worker: once
            self._workerinput = posing.workerinput(item.config)
        attempt.begin(
            None if factory is None else str(factory.getbasetemp() / f"isolated-{self._starter.taken}"),
            self._workerinput,
        )
        if self._next_is_isolated:
            self._starter.prepare(self._left)
        return attempt


class _Run:
    """One isolated test while it runs, once or, if a plugin repeats it, more often."""

    def __init__(
        self, item: pytest.Item, settings: Settings, attempt: Callable[[pytest.Item, float | None], Attempt]
    ) -> None:
        self._item = item
        self._new_attempt = attempt
        self._attempt: Attempt | None = None
        self._timeout = settings.isolate_timeout
        self._problem = ""
        try:
            marked = markers.isolated_of(item)
        except markers.MarkerError as problem:
            self._problem = str(problem)
        else:
            if marked is not None and marked.timeout is not None:
                self._timeout = marked.timeout
        self._timeout = self._timeout or None  # 0 means any time

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Have the phases of the test run here."""
        item, kind = self._item, type(self._item)
        hooks = _Hooks(item)
        item.__class__ = type(kind.__name__, (kind,), {"ihook": hooks, "__module__": kind.__module__})
        item.stash[_RUN] = self
        try:
            yield
        finally:
            del item.stash[_RUN]
            item.__class__ = kind
            self._close()

    def limit(self, seconds: float) -> None:
        """Give the process no more time than this."""
        self._timeout = seconds if self._timeout is None else min(self._timeout, seconds)

    def setup(self) -> None:
        """Start a process and wait for its first report."""
        self._close()
        if self._problem:
            pytest.fail(self._problem, pytrace=False)
        self._attempt = self._new_attempt(self._item, self._timeout)
        self._attempt.wait_for("setup")

    def call(self) -> None:
        """Wait for the second report."""
        if self._attempt is not None:
            self._attempt.wait_for("call")

    def teardown(self, nextitem: pytest.Item | None) -> None:
        """Wait for the last report and the end of the process, and for what it leaves to this one."""
        try:
            if self._attempt is not None:
                try:
                    self._attempt.wait_for("teardown")
                finally:
                    self._attempt.finish()
        finally:
            # Fixtures of wider scope that earlier tests have set up here, and that no later one needs.
            self._item.session._setupstate.teardown_exact(nextitem)

    def report(self, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Return the report of a phase."""
        if self._attempt is None:
            return pytest.TestReport.from_item_and_call(self._item, call)
        report = self._attempt.report(call)
        if call.when == "teardown":
            setattr(report, ISOLATED, {"wider": self._attempt.wider, "notes": self._attempt.notes})
        return report

    def _close(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()


class _Hooks:
    """The hooks of a test, but for those of its phases."""

    def __init__(self, item: pytest.Item) -> None:
        self._hooks = item.ihook
        manager = item.config.pluginmanager
        ours = [manager.get_plugin(NAME), manager.get_plugin(MONITOR)]
        repeats = [manager.get_plugin(name) for name in REPEATERS]  # they decide by what they see when a report is made
        for name, kept in (
            ("pytest_runtest_setup", ours),
            ("pytest_runtest_call", ours),
            ("pytest_runtest_teardown", ours),
            ("pytest_runtest_makereport", [*ours, *repeats]),
            ("pytest_exception_interact", []),
        ):
            others = [plugin for plugin in manager.get_plugins() if all(plugin is not one for one in kept)]
            setattr(self, name, manager.subset_hook_caller(name, others))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)
