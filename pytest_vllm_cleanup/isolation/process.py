"""A fresh interpreter, from the outside: started, talked to, waited for, ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pytest_vllm_cleanup.isolation.wire import Message, Wire
from pytest_vllm_cleanup.processes import marks, proc, reap, stacks
from pytest_vllm_cleanup.processes.proc import ProcessId
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

_PACKAGES = Path(__file__).resolve().parents[2]
_CODE = (
    # Without the current folder, where a module may have the name of one of the standard library.
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[3]]; "
    "from pytest_vllm_cleanup.isolation import fresh; fresh.main(int(sys.argv[1]), int(sys.argv[2]))"
)
_CHECK = 0.25  # seconds between two looks whether the process lives, where the connection does not tell of its end
_PAUSE = 0.005  # seconds between two looks at a process that is ending
_GRACE = 5.0  # seconds after SIGTERM, and again after SIGKILL
_LONGEST = 20_000  # characters of output in a report


class FreshProcess:
    """One interpreter that was started anew, never a fork; it shares nothing with this one.

    It has a session of its own, so that a Ctrl-C reaches it only through this process. The watchdog ends it, and all
    that it has started, if this process disappears.

    Args:
        shared_output: whether it writes to the standard output and error of this process; else they are kept, to be
            shown if it dies.
        environ: its environment; None: that of this process.
        streams: descriptors for its standard output and error, where the output is shared; else those of this process.
    """

    def __init__(
        self,
        *,
        shared_output: bool,
        environ: Mapping[str, str] | None = None,
        streams: tuple[int, int] | tuple[None, None] = (None, None),
    ) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self._output = None if shared_output else TemporaryFile()  # noqa: SIM115
        self._faults = TemporaryFile()  # noqa: SIM115
        self._captured: tuple[int, ...] = ()
        ours, theirs = socket.socketpair()
        try:
            arguments = [str(theirs.fileno()), str(self._faults.fileno()), str(_PACKAGES)]
            self._popen = subprocess.Popen(
                [sys.executable, *_flags(), "-c", _CODE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=streams[0] if self._output is None else self._output,
                stderr=streams[1] if self._output is None else self._output,
                env=self.environ,
                pass_fds=(theirs.fileno(), self._faults.fileno()),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._wire = Wire(ours)
        self._identity = proc.identify(self._popen.pid)
        self._known: frozenset[ProcessId] = frozenset(filter(None, [self._identity]))
        current_watchdog().ensure()
        current_watchdog().add(self._number, self._known)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """What it ended with, as in ``subprocess.Popen``; None while it runs."""
        return self._popen.poll()

    def send(self, name: str, data: Any = None, descriptors: Sequence[int] = ()) -> None:
        """Give an order. If the process is gone already, that shows when its answer is waited for."""
        with suppress(OSError):
            self._wire.send(name, data, descriptors)

    def receive(self, deadline: float | None = None) -> Message | None:
        """Wait for a message.

        Args:
            deadline: until when, on the clock of ``time.monotonic``; None: for ever.

        Returns:
            the message, None if the process has ended without another one.

        Raises:
            TimeoutError: there was none in time.
        """
        while (message := self._wire.next()) is None:
            left = _CHECK if deadline is None else deadline - time.monotonic()
            if self._is_readable(min(max(left, 0.0), _CHECK)):
                if self._wire.read():
                    self._take_captured()
                    continue
                time.sleep(_PAUSE)  # it is ending, or something in it has closed the connection
            if self._popen.poll() is not None and not (self._is_readable(0) and self._wire.read()):
                return None  # also where a child of its own keeps the connection open
            if left <= 0:
                raise TimeoutError
        return message

    def interrupt(self, grace: float) -> None:
        """Have it end in order, as on Ctrl-C, and end it if it has not after so many seconds."""
        try:
            self._popen.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace)
            self.end()
        except BaseException:  # a second Ctrl-C
            reap.send_all(self._family()(), signal.SIGKILL)
            raise

    def abort(self) -> str:
        """End the process at once. Return the stacks that its threads had."""
        self.look()
        if self._identity is not None:
            stacks.end_by_abort(self._identity)
        return self.stacks()

    def end(self) -> None:
        """End the process and all that it has started, if something is left of them, and wait until they are gone."""
        if self._identity is not None:  # the watchdog looks once a second, and may not have seen the last ones
            self._known |= marks.left_by(self._identity)
        self._family().end(_GRACE)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_GRACE)

    def close(self) -> None:
        """Let go of an ended process: its files, and what the watchdog knows of it."""
        current_watchdog().forget(self._number)
        self._wire.close()
        for descriptor in self._captured:
            os.close(descriptor)
        self._captured = ()
        self._faults.close()
        if self._output is not None:
            self._output.close()

    def discard(self) -> None:
        """End a process that has had no order."""
        self._popen.kill()
        self.end()
        self.close()

    def look(self) -> None:
        """Note what it has started so far, and would be nobody's child when it has ended."""
        self._known |= self._family()()

    def processes(self) -> frozenset[ProcessId]:
        """Return the process and what it has started, as far as they are known."""
        return self._known | current_watchdog().known(self._number)

    def stacks(self) -> str:
        """Return what Python's faulthandler printed; "" if it printed nothing."""
        return _tail(self._faults.fileno())

    def output(self) -> list[tuple[str, str]]:
        """Return what it last wrote: (of which stream, text)."""
        captured = zip(("Captured stdout", "Captured stderr", "Terminal output"), self._captured, strict=False)
        found = [(title, _tail(descriptor)) for title, descriptor in captured]
        if self._output is not None:
            found.append(("Output of the process", _tail(self._output.fileno())))
        return [(title, text) for title, text in found if text]

    @property
    def _number(self) -> int:
        return -self._popen.pid  # engines have the numbers above 0

    def _family(self) -> reap.Family:
        return reap.Family(self.processes())

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _take_captured(self) -> None:
        descriptors = self._wire.take_descriptors()
        while len(descriptors) >= 3:
            for descriptor in self._captured:
                os.close(descriptor)
            self._captured, descriptors = tuple(descriptors[:3]), descriptors[3:]


def _flags() -> list[str]:
    """Return the flags that this interpreter was started with, such as -X dev."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, _LONGEST, max(0, size - _LONGEST)).decode(errors="replace").strip()
    return f"[...]\n{text}" if size > _LONGEST else text
