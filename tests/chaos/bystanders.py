"""Processes that look like engines and are none, as they have written themselves down (``inner/bystander.py``)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Bystander:
    """One such process.

    Attributes:
        pid: its number.
        alive: whether it runs.
        received: the signals that it got.
    """

    pid: int
    alive: bool
    received: tuple[str, ...]


def bystanders(folder: Path) -> list[Bystander]:
    """Return all that there have been."""
    found = []
    for name in _files(folder):
        me = json.loads(name.read_text(encoding="utf-8"))
        found.append(Bystander(me["pid"], _find(me) is not None, tuple(me["received"])))
    return found


def end_bystanders(folder: Path) -> None:
    """Kill those that still run."""
    for name in _files(folder):
        process = _find(json.loads(name.read_text(encoding="utf-8")))
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if not file.suffix)


def _find(me: dict[str, float]) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(me["pid"]))
        if process.create_time() == me["created"] and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None
