"""One engine at a time starts on a device, or is closed there, so that none takes another one's memory for its own.

vLLM compares the device's memory before and after it has loaded a model. What others take meanwhile makes its cache too
small, and what they give back makes its start fail ("Error in memory profiling").
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from . import leavers, patience
from .folder import file_name, lock_folder
from .sharing import WORKER

_CLOSING = 120.0  # seconds to wait for a start before an engine is closed all the same
_OFTEN, _SELDOM = 0.02, 0.5  # seconds between two looks of who closes, and so comes first, and of who starts


class StartLocks:
    """Holds a lock of every device while an engine starts or is closed there.

    The locks are files, machine-wide for one user, which the operating system lets go when their holder ends, however
    it ends. They are taken in the order of the devices' names, so that two processes with several devices cannot wait
    for each other. A second lock of a device is for who starts an engine next: who comes later stands behind that one,
    also if it has given the first lock back a moment ago.

    Args:
        keys: tells which devices an engine may use now, by names that are the same in all processes.
        folder: where the files are.
    """

    def __init__(self, keys: Callable[[], Iterable[str]], folder: Path | None = None) -> None:
        self._keys = keys
        self._folder = folder
        self._locks: dict[tuple[str, str], BaseFileLock] = {}
        self._pid = os.getpid()

    @contextmanager
    def starting(self) -> Iterator[str]:
        """Have no other process start or close an engine on these devices meanwhile; a long wait is said on stderr.

        Yields:
            how long that one was waited for, and who it was, as a phrase; "" if nobody was.
        """
        begun, waited_for = time.monotonic(), []
        with self._held() as stack:
            for key in self._devices():
                waited_for += self._take(key, stack)
                leavers.see_off(self._file("leaving", key))
            who = " and ".join(dict.fromkeys(waited_for))
            yield f"{time.monotonic() - begun:.0f} s for {who}" if who else ""

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Have no other process start an engine on these devices meanwhile, nor give memory back itself.

        It looks far more often than those that wait to start one, and so comes first but for chance. One that takes
        very long to start is not waited for: the memory may be needed.
        """
        with self._held() as stack:
            self._take_first(stack)
            yield

    def leave(self) -> None:
        """Have no other process start an engine on these devices until this one, which is about to, has ended.

        A CUDA context is given back when Python has let go of everything. Several processes may leave at once.
        """
        with self.closing():
            for key in self._devices():
                leavers.announce(self._file("leaving", key))

    @contextmanager
    def _held(self) -> Iterator[ExitStack]:
        stack = ExitStack()
        try:
            yield stack
        finally:
            if os.getpid() == self._pid:  # the locks are not those of a forked child
                stack.close()

    def _devices(self) -> list[str]:
        return sorted(set(self._keys())) if os.getpid() == self._pid else []

    def _take_first(self, stack: ExitStack) -> None:
        """Take the locks before all who start an engine, as far as they can be had in time; a long wait is said."""
        began = time.monotonic()
        for key in self._devices():
            lock, left = self._lock(key), began + _CLOSING - time.monotonic()
            soon = min(left, patience.LONG)
            if _acquired(lock, stack, soon):
                continue
            if left > soon:
                patience.say(
                    f"process {os.getpid()} has waited {soon:g} s to give memory on {key} back, and goes on waiting "
                    f"for {_holder(lock)}, which starts or closes an engine there"
                )
                if _acquired(lock, stack, left - soon):
                    continue
            patience.say(
                f"process {os.getpid()} has waited {_CLOSING:g} s to give memory on {key} back, and does so beside "
                f'{_holder(lock)}; if that starts an engine, vLLM may fail to ("Error in memory profiling")'
            )

    def _take(self, key: str, stack: ExitStack) -> list[str]:
        """Take a device's lock when it is this process's turn. Return who came before, as phrases."""
        began, before, said = time.monotonic(), list[str](), False
        with ExitStack() as queue:
            while (taken := self._try(key, stack, queue)) is not None:
                waited = time.monotonic() - began
                if not before:
                    before.append(_holder(taken))
                if not said and waited >= patience.LONG:
                    said = True
                    before.append(_holder(taken))  # since then it may have been somebody else's turn
                    patience.say(
                        f"process {os.getpid()} has waited {patience.LONG:g} s to start an engine on {key}, and goes "
                        f"on waiting for {before[-1]}, which starts or closes one there, or is next"
                    )
                # Of those who are not next yet, who has waited longest looks most often.
                time.sleep(_SELDOM if taken is self._lock(key) else max(_OFTEN, _SELDOM / (1 + waited)))
        return before

    def _try(self, key: str, stack: ExitStack, queue: ExitStack) -> BaseFileLock | None:
        """Try to take a device's lock, and before it the place of who is next, which ends with the queue.

        Returns:
            the one that somebody else has; None if it is this process's turn.
        """
        device, place = self._lock(key), self._lock(key, "next")
        # Who is next may wait for this very process, which builds one engine while it builds or closes another.
        if not (device.is_locked or place.is_locked or _acquired(place, queue)):
            return place
        return None if _acquired(device, stack) else device

    def _lock(self, key: str, kind: str = "start") -> BaseFileLock:
        # One object each: an engine that is built while another one is takes its lock once more.
        if (kind, key) not in self._locks:
            self._locks[kind, key] = FileLock(self._file(kind, key), thread_local=False)
        return self._locks[kind, key]

    def _file(self, kind: str, key: str) -> Path:
        return (lock_folder() if self._folder is None else self._folder) / file_name(kind, key)


def _acquired(lock: BaseFileLock, stack: ExitStack, seconds: float = 0.0) -> bool:
    """Try to take a lock for so many seconds; it is given back with the stack. Others can read who has it."""
    try:
        lock.acquire(timeout=max(0.0, seconds), poll_interval=_OFTEN)
    except Timeout:
        return False
    stack.callback(lock.release)
    worker = os.environ.get(WORKER)
    with suppress(OSError):
        _note(lock).write_text(f"process {os.getpid()}" + (f" ({worker})" if worker else ""), encoding="utf-8")
    return True


def _holder(lock: BaseFileLock) -> str:
    try:
        return _note(lock).read_text(encoding="utf-8") or "another process"
    except (OSError, ValueError):
        return "another process"


def _note(lock: BaseFileLock) -> Path:
    # Beside the lock's own file, which filelock empties whenever somebody tries to take it.
    return Path(lock.lock_file).with_suffix(".holder")
