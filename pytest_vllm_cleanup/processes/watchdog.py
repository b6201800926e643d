"""The watchdog, as seen from the process it guards: starts its helper, tells it of each engine, repairs it."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

# By name: a test may put something else into the module subprocess just when the helper is needed.
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, TypeVar

from pytest_vllm_cleanup.guard import warn
from pytest_vllm_cleanup.processes.proc import ProcessId

_ANSWER = 2.0  # seconds that the helper has for an answer, and to leave
_STARTS = 10  # helpers that die young, one after the other; more would die again
_YOUNG = 2.0  # seconds
_CODE = (
    "import sys; sys.path.append(sys.argv[3]); from pytest_vllm_cleanup.processes import guardian; "
    "guardian.main(int(sys.argv[1]), int(sys.argv[2]))"
)


T = TypeVar("T")


def _locked(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def alone(self: Watchdog, *args: Any) -> T:
        with self._lock:
            return method(self, *args)

    return alone


class Watchdog:
    """Has the processes of engines ended when this process disappears, in whatever way.

    Nothing here raises: without a watchdog, engines are closed all the same as long as this process lives.
    """

    def __init__(self) -> None:
        self._helper: Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._engines: dict[int, set[ProcessId]] = {}
        self._starts = 0
        self._started = 0.0
        self._starting: int | None = None
        self._socket_file: tuple[int, int] | None = None
        self._lock = threading.RLock()  # children are born in any thread
        self._stderr: int | None = None

    @property
    def pid(self) -> int | None:
        """The number of the helper process, None if there is none."""
        return None if self._helper is None else self._helper.pid

    @property
    def is_starting(self) -> bool:
        """Whether the calling thread is starting the helper just now."""
        return self._starting == threading.get_ident()

    def keep_stderr(self) -> None:
        """Have the helper write to what is standard error now; where nobody calls this, it is silent."""
        if self._stderr is None:
            self._stderr = os.dup(2)

    @_locked
    def ensure(self) -> None:
        """Start the helper if it does not run: at the first engine, and when somebody has killed it."""
        if self._starts >= _STARTS or (self._helper is not None and self._helper.poll() is None):
            return
        self._leave()
        self._starts = self._starts + 1 if time.monotonic() - self._started < _YOUNG else 1
        try:
            self._starting = threading.get_ident()
            self._start()
            self._started = time.monotonic()
            if self._starts == _STARTS:
                raise RuntimeError(f"it has ended {_STARTS - 1} times, the last one is running now")
        except Exception as problem:
            warn("keeping up the watchdog, without which engines outlive a pytest that is killed,", problem)
        finally:
            self._starting = None
        for engine, processes in self._engines.items():
            self._say({"say": "add", "engine": engine, "processes": _as_data(processes)})

    @_locked
    def add(self, engine: int, processes: Iterable[ProcessId]) -> None:
        """Tell which processes belong to an engine, beside those told before."""
        new = set(processes)
        self._engines.setdefault(engine, set()).update(new)
        self._tell({"say": "add", "engine": engine, "processes": _as_data(new)})

    @_locked
    def forget(self, engine: int) -> None:
        """Tell that an engine is closed."""
        if self._engines.pop(engine, None) is not None:
            self._tell({"say": "forget", "engine": engine})

    @_locked
    def known(self, engine: int) -> frozenset[ProcessId]:
        """Return the processes of an engine, with those that the helper has seen them start."""
        told = frozenset(self._engines.get(engine, ()))
        if not told:
            return told
        self._tell({"say": "tell", "engine": engine})
        try:
            return told | {ProcessId(*process) for process in json.loads(self._answer())}
        except (OSError, ValueError):
            # It hangs or has just ended. An answer that comes too late must not be taken for the next one.
            self._end_helper()
            self.ensure()
            return told
        except BaseException:  # Ctrl-C, or a time limit: likewise
            self._end_helper()
            raise

    @_locked
    def close(self) -> None:
        """Send the helper away, unless there are engines left that it has to guard."""
        if self._engines:
            return
        if self._helper is not None:
            self._say({"say": "leave"})
            with suppress(TimeoutExpired):
                self._helper.wait(_ANSWER)
            self._end_helper()
        if self._stderr is not None:
            with suppress(OSError):
                os.close(self._stderr)
            self._stderr = None

    def abandon(self) -> None:
        """Forget the helper, in a forked child: it is the parent's."""
        if self._helper is not None:
            self._helper.returncode = 0  # not to be waited for here
        self._leave()
        self._engines.clear()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER)
        try:
            # Without site packages: nothing of the user's is imported.
            self._helper = Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(theirs.fileno()), str(os.getpid()), str(_PACKAGES)],
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL if self._stderr is None else self._stderr,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._socket_file = _file_of(ours)

    def _tell(self, message: dict[str, Any]) -> None:
        if not self._say(message):
            # A helper that cannot be reached is of no use, though it lives: a test may have closed all descriptors.
            self._end_helper()
            self.ensure()  # which tells a new one everything
            if message["say"] == "tell":
                self._say(message)

    def _say(self, message: dict[str, Any]) -> bool:
        if self._connection is None:
            return False
        if _file_of(self._connection) != self._socket_file:
            self._hang_up()
            return False
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _answer(self) -> bytes:
        answer = b""
        while self._connection is not None and not answer.endswith(b"\n"):
            piece = self._connection.recv(65536)
            if not piece:
                break
            answer += piece
        return answer

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
        self._leave()

    def _leave(self) -> None:
        self._helper = None
        self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if _file_of(connection) == self._socket_file:
            connection.close()
        else:
            connection.detach()  # its number is somebody else's now


_PACKAGES = Path(__file__).resolve().parents[2]
_watchdogs: dict[int, Watchdog] = {}


def current_watchdog() -> Watchdog:
    """Return the watchdog of this very process. It starts its helper when it is first needed."""
    me = os.getpid()
    if me not in _watchdogs:
        _watchdogs[me] = Watchdog()
    return _watchdogs[me]


def _file_of(connection: socket.socket) -> tuple[int, int] | None:
    try:
        status = os.fstat(connection.fileno())
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _after_fork() -> None:
    # A child that kept the socket open would hide the end of its parent.
    for watchdog in _watchdogs.values():
        watchdog.abandon()
    _watchdogs.clear()


os.register_at_fork(after_in_child=_after_fork)


def _as_data(processes: Iterable[ProcessId]) -> list[list[int]]:
    return [[process.pid, process.started] for process in sorted(processes)]
