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
from typing import Protocol

from filelock import BaseFileLock, FileLock, Timeout

from . import patience
from .folder import file_name, lock_folder
from .sharing import WORKER

_CLOSING = 120.0  # seconds to wait for a start before an engine is closed all the same
_OFTEN, _SELDOM = 0.02, 0.5  # seconds between two looks of who closes, and so comes first, and of who starts


class _Starting(Protocol):
    waited: str

    @property
    def number(self) -> int: ...


class StartLocks:
    """Holds a lock of every device while an engine starts or is closed there; a listener of the registry of engines.

    The locks are files, machine-wide for one user, which the operating system lets go when their holder ends, however
    it ends. They are taken in the order of the devices' names, so that two processes with several devices cannot wait
    for each other.

    Args:
        keys: tells which devices an engine may use now, by names that are the same in all processes.
        folder: where the files are.
    """

    def __init__(self, keys: Callable[[], Iterable[str]], folder: Path | None = None) -> None:
        self._keys = keys
        self._folder = folder
        self._locks: dict[str, BaseFileLock] = {}
        self._held: dict[int, ExitStack] = {}
        self._pid = os.getpid()

    def before_build(self, handle: _Starting) -> None:
        """Wait until no other process starts or closes an engine on these devices; a long wait is said on stderr."""
        if os.getpid() != self._pid:
            return  # a forked child, whose parent has the locks
        begun, waited_for = time.monotonic(), []
        with ExitStack() as stack:
            for key in sorted(set(self._keys())):
                waited_for += self._take(key)
                stack.callback(self._lock(key).release)
            self._held[handle.number] = stack.pop_all()
        if waited_for:
            who = " and ".join(dict.fromkeys(waited_for))
            handle.waited = f"{time.monotonic() - begun:.0f} s for {who}"

    def after_build(self, handle: _Starting) -> None:
        """Let the next one start."""
        if (held := self._held.pop(handle.number, None)) is not None and os.getpid() == self._pid:
            held.close()

    def after_close(self, handle: _Starting) -> None:
        """Do nothing; as a listener."""

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Have no other process start an engine on these devices meanwhile, nor give memory back itself.

        It looks far more often than those that wait to start one, and so comes first but for chance. One that takes
        very long to start is not waited for: the memory may be needed.
        """
        deadline = time.monotonic() + _CLOSING
        with ExitStack() as stack:
            if os.getpid() == self._pid:
                for key in sorted(set(self._keys())):
                    lock, rest = self._lock(key), max(0.0, deadline - time.monotonic())
                    try:
                        stack.enter_context(lock.acquire(timeout=rest, poll_interval=_OFTEN))
                        self._say_who(key)
                    except Timeout:
                        patience.say(
                            f"process {os.getpid()} has waited {_CLOSING:g} s to give memory on {key} back, and does "
                            f'so beside {self._holder(key)}; if that starts an engine, vLLM may fail to ("Error in '
                            'memory profiling")'
                        )
            yield

    def _take(self, key: str) -> list[str]:
        """Take one lock. Return who had it, as a phrase; nothing if it was free."""
        lock, waited_for = self._lock(key), []
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited_for.append(self._holder(key))
            try:
                lock.acquire(timeout=patience.LONG, poll_interval=_SELDOM)
            except Timeout:
                who = self._holder(key)  # since then it may have been somebody else's turn
                patience.say(
                    f"process {os.getpid()} has waited {patience.LONG:g} s to start an engine on {key}, and goes on "
                    f"waiting for {who}, which starts or closes one there"
                )
                waited_for.append(who)
                lock.acquire(poll_interval=_SELDOM)
        self._say_who(key)
        return waited_for

    def _say_who(self, key: str) -> None:
        with suppress(OSError):  # for others to read alone
            self._note(key).write_text(_me(), encoding="utf-8")

    def _holder(self, key: str) -> str:
        try:
            return self._note(key).read_text(encoding="utf-8") or "another process"
        except (OSError, ValueError):
            return "another process"

    def _note(self, key: str) -> Path:
        # Beside the lock's own file, which filelock empties whenever somebody tries to take it.
        return Path(self._lock(key).lock_file).with_suffix(".holder")

    def _lock(self, key: str) -> BaseFileLock:
        # One object a device: an engine that is built while another one is takes it once more.
        if key not in self._locks:
            folder = lock_folder() if self._folder is None else self._folder
            self._locks[key] = FileLock(folder / file_name("start", key), thread_local=False)
        return self._locks[key]


def _me() -> str:
    worker = os.environ.get(WORKER)
    return f"process {os.getpid()}" + (f" ({worker})" if worker else "")
