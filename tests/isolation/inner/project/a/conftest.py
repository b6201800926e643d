"""Hooks and fixtures of one folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def of_folder_a():
    print("fixture of a up")
    yield
    print("fixture of a down")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    print("hook of a before", item.name)


def pytest_runtest_teardown(item):
    print("hook of a after", item.name)
