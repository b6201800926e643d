"""Hooks and fixtures of one folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def of_folder_b():
    print("fixture of b up")
    yield
    print("fixture of b down")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    print("hook of b before", item.name)


def pytest_runtest_teardown(item):
    print("hook of b after", item.name)
