"""Exceptions of this process that stand for what happened in the other one."""

from __future__ import annotations

import builtins

import pytest
from _pytest.outcomes import Failed


class IsolatedTestDied(Failed):
    """The process of an isolated test ended before it could report."""


class _StandIn(Exception):
    """Marks exceptions that pytest's own handling needs here, while their report comes from the other process."""


def stand_in(report: pytest.TestReport) -> BaseException | None:
    """Return an exception for a report of a failure or a skip, None for one that passed.

    It has the name and the text of the one that the report tells of, since plugins that repeat tests choose by these.
    """
    if report.passed:
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    name, separator, text = (crash.message if crash is not None else "").partition(":")
    kind = name.rpartition(".")[2] if separator or name.isidentifier() else ""
    if not kind.isidentifier():
        kind, text = "Exception", str(report.longrepr)
    base = getattr(builtins, kind, Exception)
    if not (isinstance(base, type) and issubclass(base, Exception)):
        base = Exception
    try:
        return _made(kind, (_StandIn, base), text.strip())
    except TypeError:  # one that takes more than a text
        return _made(kind, (_StandIn,), text.strip())


def is_stand_in(error: BaseException) -> bool:
    """Return whether an exception was made by ``stand_in``."""
    return isinstance(error, _StandIn)


def _made(name: str, bases: tuple[type, ...], text: str) -> BaseException:
    error: BaseException = type(name, bases, {})(text)
    return error
