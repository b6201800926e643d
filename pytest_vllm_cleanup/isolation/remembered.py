"""Tests that leaked, remembered from run to run in pytest's cache."""

from __future__ import annotations

import pytest

from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.report.carried import data_of
from pytest_vllm_cleanup.stash import SETTINGS

NAME = "vllm_cleanup_remembered"
_KEY = "vllm-cleanup/leaked"


def leaked_before(config: pytest.Config) -> frozenset[str]:
    """Return the ids of the tests that are isolated because they leaked in an earlier run."""
    if config.stash[SETTINGS].isolate != "leaky":
        return frozenset()
    return frozenset(_read(config))


class Remembered:
    """Notes which tests leak, and which no longer do, in the process that sees all reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._leaked: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a verdict. What a fixture of wider scope leaked is not cured by isolating a test."""
        with guarded(f"remembering the verdict of {report.nodeid}"):
            data = data_of(report)
            if data is not None and data["outcome"] in ("leaked", "released") and not data["owner"]:
                self._leaked[report.nodeid] = data["outcome"] == "leaked"

    def pytest_sessionfinish(self) -> None:
        """Write down what has changed."""
        with guarded("remembering the tests that leak"):
            if not self._leaked or hasattr(self._config, "workerinput"):
                return
            before = _read(self._config)
            now = {*before, *(name for name, leaks in self._leaked.items() if leaks)}
            now -= {name for name, leaks in self._leaked.items() if not leaks}
            if now != before and (cache := getattr(self._config, "cache", None)) is not None:
                cache.set(_KEY, sorted(now))


def _read(config: pytest.Config) -> set[str]:
    cache = getattr(config, "cache", None)
    return set() if cache is None else set(cache.get(_KEY, []))
