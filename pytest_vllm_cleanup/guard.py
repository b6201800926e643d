"""What keeps a bug in this plugin from ending a user's test run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class VllmCleanupWarning(UserWarning):
    """Something in this plugin went wrong; the test run goes on."""


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn a bug of ours into a warning. A wrong setting is the user's business and passes."""
    try:
        yield
    except pytest.UsageError:
        raise
    except Exception as problem:
        warn(what, problem)


def warn(what: str, problem: Exception) -> None:
    """Say that something went wrong in this plugin."""
    with warnings.catch_warnings():
        # Where a run turns warnings into errors, this one would end it.
        warnings.simplefilter("always", VllmCleanupWarning)
        warnings.warn(
            f"{what} went wrong in pytest-vllm-cleanup ({type(problem).__name__}: {problem}); the test run goes on",
            VllmCleanupWarning,
            stacklevel=3,
        )
