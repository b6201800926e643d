"""A limit for the start of an engine: one that hangs is stopped, and says where it was."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pytest_vllm_cleanup.engines import stop
from pytest_vllm_cleanup.engines.errors import EngineStartTimeoutError
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.processes import stacks

DEFAULT_START_TIMEOUT = 1800.0
"""Seconds; three times what vLLM itself waits for its engine core (``VLLM_ENGINE_READY_TIMEOUT_S``)."""

_NOTICE = 5.0  # seconds that vLLM has to notice that its processes are gone
_DELIVERY = 1.0  # seconds for an interrupt that was sent to arrive
_FRAMES = 20

_current: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def start_deadline(seconds: float, what: str) -> Iterator[None]:
    """Stop the engine that is built here if that takes too long.

    Its child processes are made to print their stacks and are killed. What hangs in this process is interrupted as by
    Ctrl-C, if it is in the main thread and runs Python code or waits.

    Args:
        seconds: the limit; 0 for none.
        what: what is being built, for the error.

    Raises:
        EngineStartTimeoutError: the limit was reached; the text has the stacks.
    """
    if not seconds:
        yield
        return
    deadline = _Deadline(seconds, what)
    with stacks.printed_on_abort():
        outer = _current.set(deadline)
        try:
            deadline.run()
            try:
                yield
            finally:
                _current.reset(outer)
        except BaseException as problem:
            if deadline.finish(delivered=isinstance(problem, KeyboardInterrupt)):
                raise EngineStartTimeoutError(deadline.text) from problem
            raise
        if deadline.finish(delivered=False):
            raise EngineStartTimeoutError(deadline.text)


@contextmanager
def suspended() -> Iterator[None]:
    """Have the time of this block not count, where the start of an engine waits for others."""
    deadline = _current.get()
    if deadline is None:
        yield
        return
    deadline.pause()
    try:
        yield
    finally:
        deadline.run()


class _Deadline:
    def __init__(self, seconds: float, what: str) -> None:
        self._what, self._seconds, self._left = what, seconds, seconds
        self._builder = threading.get_ident()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._interrupted = False
        self._expired = False
        self.text = ""
        self._since = 0.0
        self._timer: threading.Timer | None = None

    def run(self) -> None:
        """Count the time from now on."""
        with self._lock:
            if self._expired:
                return
            self._since = time.monotonic()
            self._timer = threading.Timer(self._left, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def pause(self) -> None:
        """Stop counting."""
        with self._lock:
            if self._expired or self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            self._left = max(0.0, self._left - (time.monotonic() - self._since))

    def finish(self, *, delivered: bool) -> bool:
        """Take note that the constructor has returned or raised, and catch an interrupt that is still on its way.

        Returns:
            whether the limit was reached.
        """
        try:
            self._done.set()
            if self._timer is not None:
                self._timer.cancel()
            with self._lock:  # what has begun is brought to its end
                waiting = self._interrupted and not delivered
            if waiting:
                threading.Event().wait(_DELIVERY)
        except KeyboardInterrupt:
            if not self._interrupted:
                raise
        return self._expired

    def _expire(self) -> None:
        with self._lock:
            if self._done.is_set() or threading.current_thread() is not self._timer:  # stopped at the last moment
                return
            self._expired = True
            self.text = f"{self._what} did not start within {self._seconds:g} s (start_timeout)."
            with guarded(f"stopping {self._what}, which did not start,"):
                self._stop()
        if not self._done.wait(_NOTICE):
            with self._lock:
                if not self._done.is_set() and self._builder == threading.main_thread().ident:
                    self._interrupted = True
                    signal.pthread_kill(self._builder, signal.SIGINT)

    def _stop(self) -> None:
        own = "".join(traceback.format_stack(sys._current_frames().get(self._builder))[-_FRAMES:])
        ended: list[tuple[str, str]] = []
        building = self._building()
        for handle in building:
            ended += stacks.abort(stop.family(handle)())
            stop.kill(handle)
        done = "It has no child processes; this process was interrupted."
        if ended:
            done = f"Its processes were ended: {len(ended)}."
        parts = [f"{done} Raise start_timeout if it only needs longer."]
        parts += [
            f"Before that, and not counted, it had waited {handle.waited}, to start after it on the same device."
            for handle in building
            if handle.waited
        ]
        parts.append(f"This process waited here:\n{own}")
        parts += [f"Stack of {name}:\n{text}" for name, text in ended]
        self.text = "\n".join([self.text, *parts])

    def _building(self) -> list[EngineHandle]:
        return [h for h in registry.handles() if h.state is State.BUILDING and h.thread == self._builder]
