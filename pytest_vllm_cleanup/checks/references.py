"""References that pytest itself keeps to what a test made; let go before its memory is judged."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import pytest


def release(item: pytest.Item) -> None:
    """Let go of the exception that a test raised, the locals in its frames, and the fixtures' values.

    Only after the reports of setup and call are made, so nothing that the user reads is lost. Never under a debugger.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        for linked in chain(error):
            if linked.__traceback__ is not None:
                traceback.clear_frames(linked.__traceback__)
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    funcargs = getattr(item, "funcargs", None)
    if funcargs:
        funcargs.clear()


def chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an exception, its causes, its contexts and the members of groups, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
