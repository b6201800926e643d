"""Where a test report carries its result. Light: the controller of every pytest-xdist run imports it."""

from __future__ import annotations

from typing import Any

import pytest

ATTRIBUTE = "vllm_cleanup"
ISOLATED = "vllm_cleanup_isolated"
SECTION = "GPU memory"


def data_of(report: pytest.TestReport) -> dict[str, Any] | None:
    """Return what a report carries, None if its test was not checked."""
    data: dict[str, Any] | None = getattr(report, ATTRIBUTE, None)
    return data


def isolation_of(report: pytest.TestReport) -> dict[str, Any] | None:
    """Return what a report tells of the process of an isolated test, None if it ran in the session's own."""
    data: dict[str, Any] | None = getattr(report, ISOLATED, None)
    return data
