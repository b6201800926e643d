"""Who started which child process, while engines are being built.

Looking before and after tells which children are new, but not whose they are: another thread may start a program, or
another engine, at the same time. So every start is seen, with the thread that did it. Nothing is patched otherwise.
"""

from __future__ import annotations

import functools
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from pytest_vllm_cleanup.guard import guarded

Observer = Callable[[int, frozenset[threading.Thread]], None]
"""Called with the number of a child, and with the thread that has started it and those which that one comes from."""

_STARTERS: tuple[tuple[Any, str], ...] = ((BaseProcess, "start"), (subprocess.Popen, "__init__"))
_lock = threading.Lock()
_observers: list[Observer] = []
_replaced: list[tuple[Any, str, Any, Any]] = []
_origins: weakref.WeakKeyDictionary[threading.Thread, threading.Thread] = weakref.WeakKeyDictionary()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have an observer told of every child that this process starts meanwhile."""
    with _lock:
        if not _observers:
            _patch()
        _observers.append(observer)
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            if not _observers:
                _restore()


def _patch() -> None:
    for owner, name in _STARTERS:
        _replace(owner, name, _telling(getattr(owner, name)))
    _replace(threading.Thread, "start", _noting(threading.Thread.start))


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name), replacement))
    setattr(owner, name, replacement)


def _restore() -> None:
    while _replaced:
        owner, name, original, replacement = _replaced.pop()
        if getattr(owner, name) is replacement:  # else somebody wrapped it, and it passes calls on
            setattr(owner, name, original)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    me = os.getpid()

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        result = original(self, *args, **kwargs)
        if os.getpid() == me and isinstance(self.pid, int):
            for observer in list(_observers):
                with guarded("recording a child process"):
                    observer(self.pid, _line_of(threading.current_thread()))
        return result

    return start


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        _origins[self] = threading.current_thread()
        original(self, *args, **kwargs)

    return start


def _line_of(thread: threading.Thread) -> frozenset[threading.Thread]:
    line = {thread}
    while (origin := _origins.get(thread)) is not None and origin not in line:
        line.add(origin)
        thread = origin
    return frozenset(line)
