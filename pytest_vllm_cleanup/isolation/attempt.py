"""One run of one test in a fresh process, phase by phase, as the parent sees it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.isolation import coverage, failures, junit, warned
from pytest_vllm_cleanup.isolation.address import address_of
from pytest_vllm_cleanup.isolation.endings import ended, not_reported
from pytest_vllm_cleanup.isolation.process import FreshProcess
from pytest_vllm_cleanup.report.carried import ATTRIBUTE, data_of

_CLOSING = 180.0  # seconds to close an engine, which has limits of its own and may wait for its turn; or for that alone
_EXIT = 15.0  # seconds to exit beside that, after the reports are in
_FAREWELL = 15.0  # seconds to tear down, and to close engines, when the run ends


class Attempt:
    """A test's reports, which come from a process of its own.

    Args:
        item: the test, as the parent has collected it.
        process: where it runs.
        timeout: seconds that the process has for all reports; None: any time.

    Attributes:
        wider: the user's fixtures of wider scope that were set up: (name, scope, where they are defined).
        notes: what people should know of the process, one sentence each.
    """

    def __init__(self, item: pytest.Item, process: FreshProcess, timeout: float | None) -> None:
        self.wider: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self._item = item
        self._process = process
        self._timeout = timeout
        self._reports: dict[str, pytest.TestReport] = {}
        self._told: list[str] = []
        self._xfail: str | None = None
        self._died = False
        self._next = ("exit", _EXIT)
        self._handlers: dict[str, Callable[[Any], None]] = {
            "closed": lambda _: self._expect("exit", _EXIT),
            "exit": self._exit,
            "finished": self._finished,
            "internal error": self._tell("pytest itself failed in there:"),
            "interrupted": self._interrupted,
            "junit": partial(junit.write, item.config, item.nodeid),
            "leaves": lambda _: self._expect("exit", _CLOSING),
            "missing": self._tell("it was not found there: what is collected depends on the process"),
            "phase": self._phase,
            "report": self._report,
            "uncollected": self._tell("its file could not be collected there:"),
            "unconfigured": lambda _: self._expect("exit", _EXIT),
            "warning": self._warning,
        }

    def begin(self, basetemp: str | None, workerinput: dict[str, Any]) -> None:
        """Give the process its order.

        Args:
            basetemp: its folder for temporary files, None if there are none.
            workerinput: what plugins are told in there, as in a worker of pytest-xdist.
        """
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        config = self._item.config
        arguments = [str(argument) for argument in config.invocation_params.args]
        if config.pluginmanager.has_plugin("pytest_cov"):
            # It would erase the data of this process; see coverage.py. After "--" it would be a path.
            arguments.insert(arguments.index("--") if "--" in arguments else len(arguments), "--no-cov")
        self._process.send(
            "test",
            {
                "address": address_of(self._item),
                "arguments": arguments,
                "argv": list(sys.argv),
                "basetemp": basetemp,
                "coverage": coverage.settings(),
                "environ": dict(os.environ),
                "folder": str(config.invocation_params.dir),
                "junit": junit.family(config),
                "path": list(sys.path),
                "workerinput": workerinput,
            },
        )

    def wait_for(self, when: str) -> None:
        """Wait for the report of a phase.

        Raises:
            IsolatedTestDied: there will be none.
            Exception: what stands for the failure, or the skip, that the report tells of.
            pytest.exit.Exception: the test has called ``pytest.exit``, and its process has torn it down.
            KeyboardInterrupt: the test has raised it, likewise.
        """
        if self._died:
            return  # that is reported
        while when not in self._reports:
            try:
                if self._hear(self._deadline):
                    continue
                fate = ended(self._process.returncode)
            except TimeoutError:
                self._process.abort()
                fate = f"had not finished after {self._timeout:g} s, and was ended"
            self._died = True
            text = not_reported(when, fate, self._told, self._process.stacks())
            raise failures.IsolatedTestDied(text, pytrace=False)
        if (error := failures.stand_in(self._reports[when])) is not None:
            raise error

    def finish(self) -> None:
        """Wait until the process has ended, or end it. Its reports are in."""
        if not self._died:
            try:
                while self._hear(time.monotonic() + self._next[1]):
                    pass
            except TimeoutError:
                stacks, (what, limit) = self._process.abort(), self._next
                text = f"its process did not {what} within {limit:g} s of its reports and was ended\n{stacks}"
                self.notes.append(text)
                self._died = True
            else:
                if (self._process.returncode or 0) < 0:
                    fate = ended(self._process.returncode)
                    self.notes.append(f"its process {fate} while it exited\n{self._process.stacks()}")
                    self._died = True
        if self._died:
            self._process.end()  # also what it has started

    def close(self) -> None:
        """Let go of the process. If it still runs, since the run ends, it is ended: in order, if that is possible."""
        try:
            if self._process.returncode is None:
                self._process.interrupt(_FAREWELL)
        finally:
            self._process.close()

    def report(self, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Return the report of a phase that has been waited for."""
        report = self._reports.get(call.when)
        error = None if call.excinfo is None else call.excinfo.value
        if report is not None and (error is None or failures.is_stand_in(error)):
            return report
        made = pytest.TestReport.from_item_and_call(self._item, call)
        if isinstance(error, failures.IsolatedTestDied):
            made.longrepr = str(error)
            made.sections += [(f"{title} {call.when}", text) for title, text in self._process.output()]
            if call.when == "call" and self._xfail is not None:
                made.outcome, made.wasxfail = "skipped", self._xfail
        elif report is not None:
            made.sections, made.user_properties = report.sections, report.user_properties
            vars(made).update({name: value for name, value in vars(report).items() if name not in vars(made)})
            if (data := data_of(made)) is not None:
                setattr(made, ATTRIBUTE, {**data, "only_leaked": False})
            if report.failed:
                made.sections.append(("Failure in the process of the test", report.longreprtext))
        return made

    def _hear(self, deadline: float | None) -> bool:
        """Take in one message. Return whether there was one; not if the process has ended."""
        message = self._process.receive(deadline)
        if message is None:
            return False
        name, data = message
        if name in self._handlers:
            self._handlers[name](data)
        return True

    def _phase(self, data: dict[str, Any]) -> None:
        self._xfail = data["xfail"]

    def _report(self, data: dict[str, Any]) -> None:
        config = self._item.config
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        report.nodeid = self._item.nodeid  # pytest-xdist adds a group's name to it
        if type(report) is pytest.TestReport and report.when not in self._reports:
            self._reports[report.when] = report
        else:  # of a part of a test
            if (context := data.get("_subtest.context")) is not None:  # pytest quotes its values once more
                object.__setattr__(report.context, "kwargs", context["kwargs"])
            self._item.ihook.pytest_runtest_logreport(report=report)

    def _warning(self, data: dict[str, Any]) -> None:
        with guarded(f"showing a warning of {self._item.nodeid}"):
            self._item.config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": warned.from_data(data),
                    "when": "runtest",
                    "nodeid": self._item.nodeid,
                    "location": data["location"],
                }
            )

    def _finished(self, data: dict[str, Any]) -> None:
        self.wider = data["wider"]
        session = self._item.session
        session.shouldstop = session.shouldstop or data["stop"]
        session.shouldfail = session.shouldfail or data["fail"]
        if data["engines"]:
            self._expect("close its engines", _CLOSING * data["engines"])

    def _expect(self, what: str, limit: float) -> None:
        self._next = what, limit

    def _exit(self, data: dict[str, Any]) -> None:
        self._let_tear_down()
        raise pytest.exit.Exception(data["reason"], data["returncode"])

    def _interrupted(self, _: None) -> None:
        self._let_tear_down()
        raise KeyboardInterrupt

    def _let_tear_down(self) -> None:
        """Wait for the end of the process, which has told that it ends the run: its fixtures end now."""
        deadline = time.monotonic() + _FAREWELL
        with suppress(TimeoutError):
            while self._hear(deadline):
                pass

    def _tell(self, beginning: str) -> Callable[[str | None], None]:
        return lambda text: self._told.append(f"{beginning}\n{text}" if text else beginning)
