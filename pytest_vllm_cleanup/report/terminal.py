"""What the terminal shows: the status LEAKED, and a section with each leak."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.report.carried import SECTION, data_of, isolation_of

CATEGORY = "leaked"
NAME = "vllm_cleanup_terminal"


class Terminal:
    """Registered where a leak may be reported: in a run with checked tests, and in the controller of pytest-xdist."""

    def __init__(self) -> None:
        self._leaks: list[tuple[pytest.TestReport, dict[str, Any]]] = []
        self._unmeasured: list[str] = []
        self._foreign: list[str] = []
        self._wider: dict[str, None] = {}
        self._notes: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Give a leak its own status, unless the teardown failed by itself too."""
        with guarded("naming the status of a test"):
            if isinstance(report, pytest.TestReport) and _is_only_leak(report):
                return CATEGORY, "L", ("LEAKED", {"red": True})
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what leaked and what could not be measured."""
        with guarded(f"noting the result of {report.nodeid}"):
            data = data_of(report)
            if data is not None and data["outcome"] == "leaked" and report.failed:
                self._leaks.append((report, data))
            elif data is not None and data["outcome"] == "unknown":
                self._unmeasured.append(data["text"])
            elif data is not None and data["outcome"] == "foreign":
                self._foreign.append(data["text"])
            isolated = isolation_of(report)
            if isolated is not None:
                for name, scope, base in isolated["wider"]:
                    self._wider[f"{name} ({scope} scope, {base or 'a plugin'})"] = None
                self._notes += [f"{report.nodeid}: {note}" for note in isolated["notes"]]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show each leak with its evidence, what could not be measured and, with -v, what others took meanwhile."""
        with guarded("showing leaks"):
            if self._leaks:
                terminalreporter.write_sep("=", "LEAKS")
            for report, data in self._leaks:
                _show(terminalreporter, report, data)
            if self._unmeasured:
                terminalreporter.write_sep("=", "GPU memory not measured")
            for text in self._unmeasured:
                terminalreporter.write_line(text)
            if self._foreign and terminalreporter.verbosity > 0:
                terminalreporter.write_sep("=", "GPU memory that others took")
                for text in self._foreign:
                    terminalreporter.write_line(text)
            if self._wider or self._notes:
                terminalreporter.write_sep("=", "isolated tests")
            if self._wider:
                terminalreporter.write_line(f"set up again for each of them, in its process: {', '.join(self._wider)}")
            for text in self._notes:
                terminalreporter.write_line(text)


def _show(terminalreporter: pytest.TerminalReporter, report: pytest.TestReport, data: dict[str, Any]) -> None:
    terminalreporter.write_sep("_", report.head_line or report.nodeid, red=True, bold=True)
    terminalreporter.write_line(data["text"])
    for title, content in report.sections:
        # pytest has shown it already where the teardown failed by itself too.
        if title == SECTION and data["only_leaked"]:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(content)


def _is_only_leak(report: pytest.TestReport) -> bool:
    # A plugin that repeats failed tests gives the report of an earlier attempt another outcome.
    data = data_of(report)
    return data is not None and bool(data["only_leaked"]) and report.failed
