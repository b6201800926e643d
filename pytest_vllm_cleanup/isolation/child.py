"""pytest in the fresh process: the same command line and configuration, one test, and reports over the wire."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.isolation import coverage, junit, warned
from pytest_vllm_cleanup.isolation.address import Address, collectable, find
from pytest_vllm_cleanup.isolation.repeaters import REPEATERS
from pytest_vllm_cleanup.isolation.wire import Wire, plain
from pytest_vllm_cleanup.monitor import activate
from pytest_vllm_cleanup.stash import ISOLATED_CHILD
from pytest_vllm_cleanup.workers import starting

# What has been done already when the parent chose the test, what it does with the reports, and what needs a terminal.
# Writing results is the parent's too: plugins leave that alone in a worker of pytest-xdist, which this one poses as.
_SETTLED: dict[str, Any] = {
    "cacheclear": False,
    "collectonly": False,
    "deselect": None,
    "dist": "no",
    "distload": False,
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "log_file": os.devnull,  # the parent has the file open, and would write over what is written here
    "looponfail": False,
    "loadgroup": False,
    "markexpr": "",
    "maxfail": 0,
    "maxprocesses": None,
    "newfirst": False,
    "numprocesses": None,
    "pastebin": None,
    "pyargs": False,
    "stepwise": False,
    "vllm_cleanup_on_leak": "fail",  # what stays in a process that ends does not stay
}


def run(order: dict[str, Any], wire: Wire, crashes: int) -> int:
    """Run the one test of an order.

    Args:
        order: the parent's command line and what else the test depends on.
        wire: where reports go.
        crashes: descriptor of the file for the stacks of a crash.

    Returns:
        the exit status of the process.
    """
    from _pytest.config import _prepareconfig  # as pytest-xdist does in its workers

    with coverage.measured(order["coverage"]):
        config = _prepareconfig(order["arguments"], [_NoDebugFile()])
        try:
            for option, value in _SETTLED.items():
                if hasattr(config.option, option):
                    setattr(config.option, option, value)
            config.option.basetemp = order["basetemp"]
            config.args = [collectable(order["address"].path, order["folder"])]
            config.workerinput = order["workerinput"]  # type: ignore[attr-defined]
            config.workeroutput = {}  # type: ignore[attr-defined]
            for name in REPEATERS:
                config.pluginmanager.unregister(name=name)  # whose work is the parent's
            config.addinivalue_line("markers", "flaky: for plugins that repeat tests")
            config.pluginmanager.register(Messenger(order["address"], wire, crashes), ISOLATED_CHILD)
            junit.relay(config, order["junit"], partial(wire.send, "junit"))
            status = config.hook.pytest_cmdline_main(config=config)
            wire.send("leaves")
            starting.leave()
        finally:
            config._ensure_unconfigure()
            faulthandler.enable(crashes)  # exiting may crash or hang as well; pytest's plugin has turned it away
        wire.send("unconfigured")
    return int(status) if status is not None else 0


class _NoDebugFile:
    """Has pytest write none for ``--debug``: that would be the parent's, which has it open."""

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside pytest's own wrapper, which opens the file
    def pytest_cmdline_parse(self) -> Generator[None, pytest.Config, pytest.Config]:
        config = yield
        config.option.debug = None
        return config


class Messenger:
    """Leaves one test of those that are collected, and sends all that happens to it."""

    def __init__(self, address: Address, wire: Wire, crashes: int) -> None:
        self._address = address
        self._wire = wire
        self._crashes = crashes
        self._wider: dict[tuple[str, str, str], None] = {}
        self._terminal = open(os.memfd_create("terminal"), "w", encoding="utf-8")  # noqa: PTH123, SIM115

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Have stacks go where the parent looks for them, and nothing be said by pytest's own terminal."""
        faulthandler.enable(self._crashes)  # pytest's plugin has just turned it to its own file
        manager = config.pluginmanager
        if (reporter := manager.get_plugin("terminalreporter")) is not None:
            manager.unregister(reporter)
            manager.register(TerminalReporter(config, self._terminal), "terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        """Say that engines that were left are closed, and close what was opened."""
        self._wire.send("closed")
        self._terminal.close()

    # Collection

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keep to the one file, also where pytest can only be told a folder above it."""
        return None if Path(self._address.path).is_relative_to(collection_path) else True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Keep the one test, whatever others deselect because they count or remember tests."""
        found = find(items, self._address)
        try:
            return (yield)
        finally:
            items[:] = [found] if found is not None else []
            if found is None:
                self._wire.send("missing")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Have engines that nobody closes closed at the end: as its children they would keep this process for ever."""
        activate(session.config)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Send why a file cannot be collected here."""
        if report.failed:
            self._wire.send("uncollected", str(report.longrepr))

    # The test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run it once: whether it is run again, in a new process, is for the parent's plugins to say."""
        from _pytest.runner import runtestprotocol  # as plugins that repeat tests do

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    # First among those that are no wrappers: output is captured now, into files that the parent shall see if we die.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Say that a phase begins."""
        self._begin("setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Say that a phase begins, and whether the test is expected to fail in it."""
        self._begin("call", _expected_failure(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Say that a phase begins."""
        self._begin("teardown")

    def _begin(self, when: str, xfail: str | None = None) -> None:
        # What plugins print while a phase runs is kept apart: pytest-timeout prints stacks and ends the process.
        self._clear_terminal()
        self._wire.send("phase", {"when": when, "xfail": xfail}, (1, 2, self._terminal.fileno()))

    def _clear_terminal(self) -> None:
        self._terminal.seek(0)
        self._terminal.truncate()

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Note the user's fixtures of wider scope, which the parent may have set up too."""
        package = (getattr(fixturedef.func, "__module__", None) or "").partition(".")[0]
        if fixturedef.scope != "function" and package not in ("_pytest", "pytest_vllm_cleanup", "xdist"):
            self._wider[fixturedef.argname, fixturedef.scope, fixturedef.baseid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        config = self._config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._wire.send("report", plain(data))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Send a warning of the test. The parent has seen those of the collection itself."""
        if when == "runtest":
            self._wire.send("warning", warned.as_data(warning_message, nodeid, location))

    # The end

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember the session's configuration."""
        self._config = session.config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Send what the parent's session has to know."""
        try:
            return (yield)
        finally:
            self._wire.send(
                "finished",
                {
                    "wider": list(self._wider),
                    "stop": plain(session.shouldstop),
                    "fail": plain(session.shouldfail),
                    "engines": len(list(registry.handles())),  # as they are closed after this
                },
            )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Send that the test has ended the whole run."""
        error = excinfo.value
        if isinstance(error, pytest.exit.Exception):
            self._wire.send("exit", {"reason": str(error.msg), "returncode": error.returncode})
        elif not isinstance(error, pytest.Session.Interrupted):  # which says what "finished" says as well
            self._wire.send("interrupted")

    @pytest.hookimpl(trylast=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        """Send that pytest itself has failed."""
        self._clear_terminal()  # which says the same
        self._wire.send("internal error", str(excrepr))


def _expected_failure(item: pytest.Item) -> str | None:
    """Return why a test is marked xfail, if any failure will do; None if it is not."""
    try:
        from _pytest.skipping import xfailed_key
    except ImportError:
        return None
    expected = item.stash.get(xfailed_key, None)
    if expected is None or expected.raises is not None or item.config.option.runxfail:
        return None
    return expected.reason or ""
