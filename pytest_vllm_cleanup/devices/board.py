"""The waiting list for devices, in a file that the processes of one user share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..processes import proc
from ..processes.proc import ProcessId
from . import patience, turns
from .folder import lock_folder
from .turns import Claim

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds between two looks


class Board:
    """The place of a process in the waiting list; see ``turns`` for the rules.

    Args:
        folder: where the list is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = lock_folder() if folder is None else folder
        self._file = folder / "turns.json"
        # Held for a moment only, and let go by the system when its holder ends.
        self._lock = FileLock(folder / "turns.lock", thread_local=False)
        me = proc.identify(os.getpid())
        self._me = (os.getpid(), 0 if me is None else me.started)

    def wait(
        self,
        devices: Iterable[str],
        *,
        exclusive: bool,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wait until it is this process's turn on all of these devices; a long wait is said on stderr.

        Args:
            devices: which ones, by names that are the same in all processes.
            exclusive: whether nobody else may be on them.
            sleep: waits for so many seconds.
        """
        mine = Claim(*self._me, 0, "waiting", frozenset(devices), exclusive)
        with self._lock:
            waits_for = self._advance(turns.enter(self._read(), mine))
        pause, waited, said = _FIRST_PAUSE, 0.0, False
        try:
            while waits_for:
                if waited >= patience.LONG and not said:
                    said = True
                    patience.say(_why(mine, waits_for))
                sleep(pause)
                waited += pause
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                with self._lock:
                    claims = self._read()
                    if all(claim.process != self._me for claim in claims):  # somebody has removed the file
                        claims = turns.enter(claims, mine)
                    waits_for = self._advance(claims)
        except BaseException:  # Ctrl-C: nobody may wait for a claim that nobody wants any more
            self.leave()
            raise

    def leave(self, rests_on: Iterable[str] = ()) -> None:
        """Give the devices back, but for those on which engines of this process stay."""
        with self._lock:
            self._write(turns.leave(self._read(), self._me, frozenset(rests_on)))

    def _advance(self, claims: list[Claim]) -> list[Claim]:
        claims, waits_for = turns.advance(claims, self._me)
        self._write(claims)
        return waits_for

    def _read(self) -> list[Claim]:
        try:
            entries: list[dict[str, Any]] = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # nobody was here, or the disk was full
            return []
        claims = [
            Claim(**{**entry, "devices": frozenset(entry["devices"]), "rests_on": frozenset(entry["rests_on"])})
            for entry in entries
        ]
        return [claim for claim in claims if claim.process == self._me or proc.is_running(ProcessId(*claim.process))]

    def _write(self, claims: list[Claim]) -> None:
        entries = [
            {**asdict(claim), "devices": sorted(claim.devices), "rests_on": sorted(claim.rests_on)} for claim in claims
        ]
        unfinished = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(entries), encoding="utf-8")
        unfinished.replace(self._file)


def _why(mine: Claim, waits_for: list[Claim]) -> str:
    others = " and ".join(
        f"process {claim.pid} ({claim.state}, on {', '.join(sorted(claim.devices))})" for claim in waits_for
    )
    return (
        f"process {mine.pid} has waited {patience.LONG:g} s for its turn on {', '.join(sorted(mine.devices))}, "
        f"and goes on waiting for {others}"
    )
