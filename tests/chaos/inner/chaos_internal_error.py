"""Plugin of an inner run that has a bug: pytest reports an INTERNALERROR."""

from __future__ import annotations


def pytest_runtest_logreport(report):
    if report.when == "call":
        raise RuntimeError("a bug in a plugin")
