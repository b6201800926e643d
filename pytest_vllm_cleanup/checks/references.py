"""References that pytest itself keeps to what a test made; let go before its memory is judged."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

import pytest

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_YIELDS = {dis.opmap[name] for name in ("YIELD_VALUE", "YIELD_FROM") if name in dis.opmap}


def release(item: pytest.Item, errors: list[BaseException]) -> None:
    """Let go of what a test raised, the locals in its frames, the fixtures' values, and its class instance.

    Only after the reports of these failures are made, so nothing that the user reads is lost. Never under a debugger.

    Args:
        item: the test.
        errors: what failed its phases, beside what pytest left in ``sys``.
    """
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for error in (*errors, *([] if last is None else [last])):
        for linked in chain(error):
            _clear_frames(linked.__traceback__)
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    funcargs = getattr(item, "funcargs", None)
    if funcargs:
        funcargs.clear()
    if isinstance(item.parent, pytest.Class):
        # Each test has its own instance; pytest keeps it to the end of the session, and makes a new one when asked.
        vars(item).pop("_instance", None)
        vars(item).pop("_obj", None)
    if vars(item).get("_cached_errors_and_skips") is not None:  # of a unittest.TestCase with subTest, on Python 3.10
        vars(item)["_cached_errors_and_skips"] = None


def release_log_records(config: pytest.Config) -> None:
    """Let go of what was logged in a teardown, with its arguments; pytest has made its text of it, and keeps it.

    Not before the teardown is over.
    """
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    for name in ("caplog_handler", "report_handler"):
        records = getattr(getattr(plugin, name, None), "records", None)
        if records:
            records.clear()


def unreported(item: pytest.Item) -> bool:
    """Whether a test has failed in a way that pytest reports only at its end, and has not reported yet.

    A ``unittest.TestCase`` may fail in ``setUp`` or the test, in ``tearDown`` and in every clean-up. pytest reports the
    first failure with the call, the second with the teardown, and no more.
    """
    return bool(getattr(item, "_excinfo", None))


def take_unreported(item: pytest.Item) -> list[BaseException]:
    """Take from pytest, when a test's last report is made, the failures that it will never report."""
    left = getattr(item, "_excinfo", None) or []
    errors = [info.value for info in left]
    left.clear()
    return errors


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


def _clear_frames(trace: TracebackType | None) -> None:
    while trace is not None:
        frame = trace.tb_frame
        try:
            if not _is_suspended(frame, trace.tb_lasti):
                frame.clear()
        except RuntimeError:  # still running
            pass
        else:
            # Whoever shows locals leaves a copy of them in the frame (before Python 3.13); looking again empties it.
            _ = frame.f_locals
        trace = trace.tb_next


def _is_suspended(frame: FrameType, raised_at: int) -> bool:
    """Whether a generator goes on after it has caught what it raised, as a fixture does that yields later.

    Up to Python 3.12, clearing its frame would close it.
    """
    if not frame.f_code.co_flags & _GENERATORS or frame.f_lasti == raised_at:
        return False
    # Python 3.10 stands one instruction before an await.
    return not _YIELDS.isdisjoint(frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 3 : 2])
