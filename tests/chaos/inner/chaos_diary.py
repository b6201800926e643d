"""Plugin of the inner runs: writes down what happens when, for whoever watches from outside."""

from __future__ import annotations

import json
import os
import resource
import time

import pytest

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the dumps of those that crash would be gigabytes


def note(event, **facts):
    line = json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **facts}) + "\n"
    descriptor = os.open(os.environ["CHAOS_DIARY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    note("start", test=item.name)
    try:
        return (yield)
    finally:
        note("end", test=item.name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    note(
        "report",
        test=item.name,
        when=report.when,
        outcome="xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome,
        properties=dict(report.user_properties),
        text=str(report.longrepr)[-2000:] if report.failed else "",
    )
    return report
