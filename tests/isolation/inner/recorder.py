"""A plugin that writes down all reports and warnings that a run's session sees."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers")
REPORTS, WARNINGS = [], []


@pytest.fixture(scope="session", autouse=True)
def machine(record_testsuite_property):
    record_testsuite_property("machine", 7)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.description = f"{item.name} {call.when}"
    report.extras = [{"name": call.when, "content": ["text", 1, None]}]
    if call.when == "teardown":
        report.user_properties.append(("by hook", report.outcome))
        report.sections.append(("By hook", "text"))
    return report


def pytest_runtest_logreport(report):
    data = report._to_json()
    data.update(caplog=report.caplog, head=report.head_line, longreprtext=report.longreprtext)
    REPORTS.append(data)


def pytest_warning_recorded(warning_message, when, nodeid, location):
    WARNINGS.append(
        {
            "text": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
    )


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput") and "RECORD" in os.environ:
        text = json.dumps({"reports": REPORTS, "warnings": WARNINGS}, default=str)
        Path(os.environ["RECORD"]).write_text(text)
