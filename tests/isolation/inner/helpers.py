"""What the tests raise, and how they look. pytest rewrites its assertions, since the conftest says so."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup  # pytest needs it there


class Odd:
    def __repr__(self):
        return "<odd [thing]>"


class Unpicklable(Exception):
    def __init__(self, function):
        super().__init__("no", "pickle")
        self.function = function

    def __reduce__(self):
        raise TypeError("does not pickle")


def assert_even(number):
    half = number // 2
    assert half * 2 == number, "odd"


def chained():
    try:
        {}["missing"]
    except KeyError as error:
        try:
            raise ValueError("second") from error
        except ValueError:
            raise Unpicklable(print)  # noqa: B904


def group():
    raise ExceptionGroup("several", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])])
