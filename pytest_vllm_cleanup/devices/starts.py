"""One engine at a time starts on a device, so that none takes what another one is loading for its own.

vLLM compares the device's memory before and after it has loaded a model. What others take or give meanwhile makes its
cache too small or its start fail ("Error in memory profiling").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from filelock import BaseFileLock, FileLock

from .folder import file_name, lock_folder


class _Numbered(Protocol):
    @property
    def number(self) -> int: ...


class StartLocks:
    """Holds a lock of every device while an engine starts there; a listener of the registry of engines.

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

    def before_build(self, handle: _Numbered) -> None:
        """Wait until no other process starts an engine on these devices."""
        if os.getpid() != self._pid:
            return  # a forked child, whose parent has the locks
        with ExitStack() as stack:
            for key in sorted(set(self._keys())):
                stack.enter_context(self._lock(key))
            self._held[handle.number] = stack.pop_all()

    def after_build(self, handle: _Numbered) -> None:
        """Let the next one start."""
        if (held := self._held.pop(handle.number, None)) is not None and os.getpid() == self._pid:
            held.close()

    def after_close(self, handle: _Numbered) -> None:
        """Do nothing; as a listener."""

    def _lock(self, key: str) -> BaseFileLock:
        # One object a device: an engine that is built while another one is takes it once more.
        if key not in self._locks:
            folder = lock_folder() if self._folder is None else self._folder
            self._locks[key] = FileLock(folder / file_name("start", key), thread_local=False)
        return self._locks[key]
