"""What keeps a bug of ours from ending a user's test run, or an engine that is being built. Standard library only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class VllmCleanupWarning(UserWarning):
    """Something in this package went wrong; what it was asked to watch goes on."""


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn a bug of ours into a warning."""
    try:
        yield
    except Exception as problem:
        warn(what, problem)


def warn(what: str, problem: BaseException) -> None:
    """Say that something went wrong in this package."""
    with warnings.catch_warnings():
        # Where a run turns warnings into errors, this one would end it.
        warnings.simplefilter("always", VllmCleanupWarning)
        warnings.warn(
            f"{what} went wrong in pytest-vllm-cleanup ({type(problem).__name__}: {problem}); the test run goes on",
            VllmCleanupWarning,
            stacklevel=3,
        )
