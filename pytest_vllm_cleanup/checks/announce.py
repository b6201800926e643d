"""Telling the rest of a test run about a leak that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pytest_vllm_cleanup.checks.quarantine import Leak, farewell
from pytest_vllm_cleanup.guard import warn


def announce(
    item: pytest.Item, leaks: Iterable[Leak], *, end_the_run: bool, restart: Callable[[str], None] | None = None
) -> None:
    """Call the hook for leaks that stay, and have pytest stop after this test if wanted.

    What a hook raises is a warning, since the test has failed already; but ``pytest.exit`` and Ctrl-C pass.

    Args:
        item: the test that was running.
        leaks: what is new.
        end_the_run: whether the run ends with this test, as with ``-x``.
        restart: has this process replaced after this test, for a reason; None if it goes on.
    """
    for leak in leaks:
        if restart is not None:
            restart(f"{leak}")
        if end_the_run and not item.session.shouldfail:
            # pytest.exit would end it before the leak has been reported.
            item.session.shouldfail = farewell(leak)
        try:
            item.ihook.pytest_vllm_cleanup_leaked(item=item, leak=leak)
        except pytest.exit.Exception:
            raise
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as problem:
            warn("a hook pytest_vllm_cleanup_leaked", problem)
