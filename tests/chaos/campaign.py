"""Plays the runs that the selected tests ask for: each one once, the longest first."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from .arena import Arena
from .records import Records
from .runs import Fate, Run


class Campaign:
    """Starts to play at once, and has the results when they are asked for.

    Args:
        arena: where they are played.
        records: learns of each run that has ended.
        runs: what is to be played.
        at_once: how many at a time. They wait for imports most of the time, which use one processor.
    """

    def __init__(self, arena: Arena, records: Records, runs: Iterable[Run], at_once: int) -> None:
        self._arena = arena
        self._records = records
        self._executor = ThreadPoolExecutor(at_once)
        self._fates: dict[Run, Future[Fate]] = {}
        for run in sorted(set(runs), key=lambda run: (-run.seconds, str(run))):
            self._fates[run] = self._executor.submit(self._play, run)

    def fate(self, run: Run) -> Fate:
        """Return what became of a run, when it is over."""
        return self._fates[run].result()

    def stop(self) -> None:
        """End what is being played, and play no more."""
        self._arena.closed.set()
        self._executor.shutdown(cancel_futures=True)

    def _play(self, run: Run) -> Fate:
        fate = self._arena.play(run)
        self._records.finished(fate)
        return fate
