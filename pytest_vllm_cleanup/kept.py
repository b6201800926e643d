"""What pytest keeps of tests, such as failures and instances of classes: known, let go of when memory is judged."""

from __future__ import annotations

from weakref import WeakSet

import pytest

from pytest_vllm_cleanup.checks import references
from pytest_vllm_cleanup.guard import guarded

_ERRORS = pytest.StashKey[list[BaseException]]()


class Kept:
    """Lets go of it for those who judge.

    Args:
        debugging: whether a debugger may look at failed tests, so that nothing is let go.
    """

    def __init__(self, *, debugging: bool) -> None:
        self._debugging = debugging
        self._released: list[references.Released] = []
        self._over: WeakSet[pytest.Item] = WeakSet()

    def begin(self, item: pytest.Item) -> None:
        """Note that a test is measured from now on."""
        item.stash[_ERRORS] = []

    def runs(self, item: pytest.Item) -> None:
        """Note that a test runs; a plugin may repeat it."""
        self._over.discard(item)

    def failed(self, item: pytest.Item, error: BaseException) -> None:
        """Note what has failed a phase of a test, when its report is made."""
        item.stash[_ERRORS].append(error)

    def torn_down(self, item: pytest.Item) -> None:
        """Note the failures of a test that pytest will never report."""
        item.stash[_ERRORS] += references.take_unreported(item)

    def over(self, item: pytest.Item) -> None:
        """Note that a test is over."""
        self._over.add(item)

    def is_left_to_debugger(self, item: pytest.Item) -> bool:
        """Return whether a test has failed and its failure is not let go of."""
        return self._debugging and bool(item.stash[_ERRORS])

    def let_go(self, item: pytest.Item, *, torn_down: bool = False) -> None:
        """Let go of what pytest keeps of a test. The reports of what has failed so far are made."""
        if self._debugging or references.unreported(item):
            return
        references.release_instances(self._over)
        self._over.clear()
        self._released.append(references.release(item, item.stash[_ERRORS]))
        item.stash[_ERRORS].clear()
        if torn_down:
            references.release_log_records(item.config)

    def restore(self, item: pytest.Item) -> None:
        """Put back what is still alive: hooks of others may look at it."""
        with guarded(f"restoring the fixtures' values of {item.nodeid}"):
            while self._released:
                self._released.pop().restore()

    def forget(self, item: pytest.Item) -> None:
        """Forget what has failed a test, which pytest keeps no longer."""
        item.stash[_ERRORS].clear()
