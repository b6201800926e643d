"""What happens when the test run ends, however it ends: no engine of a test is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

import pytest

from pytest_vllm_cleanup.engines import stop
from pytest_vllm_cleanup.engines.close import close_handle
from pytest_vllm_cleanup.engines.registry import EngineHandle, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

NAME = "vllm_cleanup_leaving"


def activate(config: pytest.Config) -> None:
    """Have engines closed when a run ends, if that was not arranged yet."""
    if not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(Leaving(config), NAME)


class Terminated(KeyboardInterrupt):
    """The run was asked to end by SIGTERM. pytest then tears down as it does for Ctrl-C."""


class Leaving:
    """Closes what tests have left when the session ends, and keeps the watchdog up until then.

    SIGTERM ends the run in order, unless somebody else handles it. A worker of pytest-xdist gets no such handler: its
    controller would take an early farewell for an error. There the watchdog does it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._terminated = False
        self._outer = frozenset(registry.handles())  # this run may be one inside another, of a test of a plugin
        with guarded("keeping standard error for the watchdog"):
            # As it is now, between two captures: later it may be a file of pytest's.
            current_watchdog().keep_stderr()
        is_worker, is_main = hasattr(config, "workerinput"), threading.current_thread() is threading.main_thread()
        if is_main and not is_worker and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one is obeyed at once
        self._terminated = True
        raise Terminated(f"by {signal.Signals(number).name}")

    def pytest_runtest_setup(self) -> None:
        with guarded("looking after the watchdog"):
            if any(registry.handles()):
                current_watchdog().ensure()  # somebody may have ended it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        try:
            yield  # fixtures that are still set up are torn down in here
            self.close_engines()
        except BaseException:  # a second Ctrl-C: no more waiting
            with guarded("killing the engines that tests have left"):
                for handle in self._engines_of_tests():
                    stop.kill(handle)
            raise
        finally:
            if self._terminated:
                session.exitstatus = 128 + signal.SIGTERM

    def close_engines(self) -> None:
        """Close the engines that tests have left, newest first."""
        with guarded("closing the engines that tests have left"):
            for handle in self._engines_of_tests():
                with guarded(f"closing {handle} at the end of the run"):
                    close_handle(handle)

    def pytest_unconfigure(self) -> None:
        with guarded("giving SIGTERM back"):
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with guarded("sending the watchdog away"):
            current_watchdog().close()

    def _engines_of_tests(self) -> list[EngineHandle]:
        """Return the open engines of tests and their fixtures, newest first. Others live as long as the process."""
        return [h for h in reversed(list(registry.handles())) if h.owner.node and h not in self._outer]


def _after_fork() -> None:
    # A Python handler waits for the interpreter, which a forked child in native code does not come back to.
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__func__", None) is Leaving._terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
