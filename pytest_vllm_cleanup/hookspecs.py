"""Hooks of this plugin that a conftest.py or another plugin may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_vllm_cleanup.checks.quarantine import Leak


def pytest_vllm_cleanup_leaked(item: pytest.Item, leak: Leak) -> None:
    """Do something about memory that a test or fixture has taken for good, such as stopping a shared server.

    Called once for each leak that is still there when everything has been closed and waited for, before the report of
    the test's teardown is made.

    Args:
        item: the test that was running when the leak was noticed.
        leak: who leaked how many bytes on which device, and who holds them.
    """
