"""References that pytest itself keeps to what a test made; let go before its memory is judged."""

from __future__ import annotations

import builtins
import gc
import inspect
import pathlib
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import pytest

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# By id, here and below: comparing a user's types may run code of theirs.
_FRAME_OF = {
    id(types.GeneratorType): "gi_frame",
    id(types.CoroutineType): "cr_frame",
    id(types.AsyncGeneratorType): "ag_frame",
}
_CONTAINERS = {id(kind) for kind in (list, tuple, dict, set, frozenset)}
_HOLD_NOTHING = _CONTAINERS | {
    id(kind)
    for kind in (type(None), bool, int, float, complex, str, bytes, type(pathlib.Path()), type(pathlib.PurePath()))
}
_HOLD_NOTHING |= {id(kind) for kind in (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)}
_SMALL = 2**16  # bytes
# Read past what the class of an exception may define under these names.
_cause_of = vars(BaseException)["__cause__"].__get__
_context_of = vars(BaseException)["__context__"].__get__
_traceback_of = vars(BaseException)["__traceback__"].__get__


class Gone:
    """Stands where a value was that nothing but pytest held.

    Hooks of others may still look at it, and one that raises ends the run: what the value had is asked for and called
    to no effect.
    """

    def __init__(self, name: str, nodeid: str) -> None:
        self._text = f"<{name} is gone: only pytest still held it when {nodeid} was checked for leaks>"

    def __repr__(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Gone:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Gone:
        """Do nothing."""
        return self


@dataclass
class Released:
    """What was let go of. Holds weak references alone."""

    _values: list[tuple[dict[str, Any], str, Gone, weakref.ref[Any]]] = field(default_factory=list)

    def let_go(self, values: dict[str, Any], nodeid: str) -> None:
        """Let go of what may hold memory in a dictionary; its keys stay."""
        for name, value in list(values.items()):
            if type(value) is Gone or _holds_nothing(value):
                continue
            values[name] = gone = Gone(name, nodeid)
            with suppress(TypeError):  # a list of tensors, say, allows no weak reference
                self._values.append((values, name, gone, weakref.ref(value)))

    def restore(self) -> None:
        """Put back what is still alive, for those who look later. To be called when memory is judged."""
        for values, name, gone, reference in self._values:
            value = reference()
            if value is not None and values.get(name) is gone:
                values[name] = value
        self._values.clear()


def release(item: pytest.Item, errors: list[BaseException]) -> Released:
    """Let go of what a test raised, the locals in its frames, the fixtures' values, and its class instance's.

    Only after the reports of these failures are made, so nothing that the user reads is lost. Never under a debugger.
    What a fixture that lives on has raised is left to it: it fails the tests that follow too, and they are reported.

    Args:
        item: the test.
        errors: what failed its phases, beside what pytest left in ``sys``.

    Returns:
        what is to be restored when memory is judged.
    """
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    raised = [linked for error in (*errors, *([] if last is None else [last])) for linked in chain(error)]
    kept = {id(linked) for error in raised if _is_cached(error) for linked in chain(error)}
    for error in raised:
        if id(error) not in kept:
            _clear_frames(traceback_of(error))
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    released = Released()
    released.let_go(getattr(item, "funcargs", None) or {}, item.nodeid)
    if isinstance(item.parent, pytest.Class):
        # Each test has its own instance, and pytest keeps it to the end of the session.
        _replace_instance(item)
    if vars(item).get("_cached_errors_and_skips") is not None:  # of a unittest.TestCase with subTest, on Python 3.10
        vars(item)["_cached_errors_and_skips"] = None
    return released


def release_instances(items: Iterable[pytest.Item]) -> None:
    """Let go of the class instances of tests that are over, which a fixture of theirs may have filled."""
    for item in items:
        if isinstance(item.parent, pytest.Class):
            _replace_instance(item)


def _replace_instance(item: pytest.Item) -> None:
    """Put an empty instance in the place of a test's own, for good: pytest would keep it to the end of the session."""
    instance = vars(item).get("_instance")
    try:
        stand_in = object.__new__(type(instance))
        for name, value in vars(instance).items():
            vars(stand_in)[name] = value if _holds_nothing(value) else Gone(name, item.nodeid)
    except TypeError:  # none, or a class that allows no such thing
        return
    vars(item)["_instance"] = stand_in
    vars(item).pop("_obj", None)  # its method; pytest makes another one when asked


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
        waiting += [_cause_of(current), _context_of(current), *_members(current)]


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception, whatever its class defines."""
    trace: TracebackType | None = _traceback_of(error)
    return trace


def _members(error: BaseException) -> tuple[BaseException, ...]:
    # Of Python 3.10 there is only a backport, which pytest has imported.
    module = builtins if sys.version_info >= (3, 11) else sys.modules.get("exceptiongroup")
    group: Any = getattr(module, "BaseExceptionGroup", None)
    if group is None or not issubclass(type(error), group):
        return ()
    members: tuple[BaseException, ...] = vars(group)["exceptions"].__get__(error)
    return members


def _is_cached(error: BaseException) -> bool:
    """Whether a fixture that has not ended has raised it: pytest raises it in every test that asks for the fixture."""
    trace = traceback_of(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "pytest_fixture_setup":
            cached = getattr(trace.tb_frame.f_locals.get("fixturedef"), "cached_result", None)
            if cached is not None and cached[2] is not None and cached[2][0] is error:
                return True
        trace = trace.tb_next
    return False


def _holds_nothing(value: object) -> bool:
    """Whether a value is text, a number, a path or a weak reference, or a small container of nothing else."""
    seen: set[int] = set()
    waiting, size = [value], 0
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if id(type(current)) not in _HOLD_NOTHING or size > _SMALL:
            return False
        size += sys.getsizeof(current)
        if id(type(current)) in _CONTAINERS:
            waiting += gc.get_referents(current)
    return size <= _SMALL


def _clear_frames(trace: TracebackType | None) -> None:
    while trace is not None:
        frame = trace.tb_frame
        try:
            if not _is_suspended(frame):
                frame.clear()
        except RuntimeError:  # still running
            pass
        else:
            # Whoever shows locals leaves a copy of them in the frame (before Python 3.13); looking again empties it.
            _ = frame.f_locals
        trace = trace.tb_next


def _is_suspended(frame: FrameType) -> bool:
    """Whether a generator goes on after it has caught what it raised, as a fixture does that yields later.

    Up to Python 3.12, clearing its frame would close it.
    """
    if not frame.f_code.co_flags & _GENERATORS:
        return False
    if sys.version_info >= (3, 11):
        # What is in the frame is the generator's until that is over; until then the frame does not refer to it.
        return all(held is not frame.f_code for held in gc.get_referents(frame))
    return any(
        getattr(holder, _FRAME_OF[id(type(holder))]) is frame
        for holder in gc.get_referrers(frame)
        if id(type(holder)) in _FRAME_OF
    )
