"""Runs a pytest, brings it down, and watches from outside what becomes of it and its engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import unmeasured

from .bystanders import bystanders, end_bystanders
from .device import Device
from .family import Family
from .runs import GONE_WITHIN, IN_PROCESS, Fate, Run

_INNER = Path(__file__).with_name("inner")
_LOOK = 0.05  # seconds between two looks
_LATE = 20.0  # seconds to go on looking at what has not gone in time, to say how long it took


class Arena:
    """Where inner runs take place.

    Args:
        folder: an empty folder.
        model: a good model.
        corrupt_model: one that cannot be loaded.
        device: what the engines run on.
    """

    def __init__(self, folder: Path, model: Path, corrupt_model: Path, device: Device) -> None:
        self._folder = folder
        self._models = {"CHAOS_MODEL": str(model), "CHAOS_CORRUPT_MODEL": str(corrupt_model)}
        self._device = device
        self.closed = threading.Event()

    def play(self, run: Run, timeout: float = 600.0) -> Fate:
        """Run it to its end, whatever that is, and end what it leaves."""
        folder = self._folder / "".join(letter if letter.isalnum() else "_" for letter in str(run))
        (folder / "bystanders").mkdir(parents=True)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                self._command(run, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ(run, folder),
                cwd=folder,
                start_new_session=True,
                # Ignored by jobs in the background of a shell, and so by all that they start.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        fate, family = Fate(run, time.time()), Family(process.pid)
        try:
            self._strike(process, fate, family, folder / "diary", fate.began + timeout)
            fate.ended = time.time()
            if not self.closed.is_set():
                self._watch_the_end(fate, family, folder / "bystanders")
        finally:
            fate.family = family.members(_numbers(folder / "bystanders"))
            for seen in family.left():
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen.process.kill()
            end_bystanders(folder / "bystanders")
            process.kill()
            process.wait()
            fate.output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        return fate

    def _command(self, run: Run, folder: Path) -> list[str]:
        installed = any(point.name == "vllm_cleanup" for point in metadata.entry_points(group="pytest11"))
        command = [sys.executable, "-m", "pytest", "-v", "-rA", "--color=no", f"--rootdir={_INNER}"]
        command += ["-c", str(folder / "pytest.ini"), f"--confcutdir={_INNER}", "-p", "no:cacheprovider"]
        command += ["-p", "vllm_cleanup" if installed else "pytest_vllm_cleanup.plugin", "-p", "chaos_diary"]
        command += [*run.arguments, str(_INNER / run.suite)]
        if run.bystander:
            # In the session and the process group of pytest, and nobody's child any more.
            shell = f'({sys.executable} {_INNER / "bystander.py"} &); exec "$@"'
            command = ["sh", "-c", shell, "sh", *command]
        return command

    def _environ(self, run: Run, folder: Path) -> dict[str, str]:
        paths = [str(_INNER), os.environ.get("PYTHONPATH", ""), str(_INNER.parents[2])]
        return {
            **unmeasured.environment(),
            **self._models,
            "CHAOS_DIARY": str(folder / "diary"),
            "CHAOS_BYSTANDERS": str(folder / "bystanders"),
            "CHAOS_ENGINE": json.dumps(self._device.engine(run.mode == IN_PROCESS)),
            "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if run.mode == IN_PROCESS else "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def _strike(self, process: subprocess.Popen[bytes], fate: Fate, family: Family, diary: Path, end: float) -> None:
        """Watch the run until it has ended, and send what it is hit by."""
        blows = list(fate.run.blows)
        while process.poll() is None and time.time() < end and not self.closed.is_set():
            family.look()
            if (held := self._device.held(family.pids())) is not None:
                fate.peak = max(held, fate.peak or 0)
            fate.diary = _notes(diary)
            if blows and (noted := fate.events(blows[0].event)):
                blow = blows.pop(0)
                with contextlib.suppress(ProcessLookupError):
                    if blow.group:
                        os.killpg(process.pid, blow.number)
                    else:
                        os.kill(noted[0]["pid"], blow.number)
            time.sleep(_LOOK)
        fate.status = process.returncode
        fate.diary = _notes(diary)

    def _watch_the_end(self, fate: Fate, family: Family, folder: Path) -> None:
        """Wait until all is gone, and note what is not."""
        self._wait_for(family, folder, fate.ended + GONE_WITHIN)
        fate.left = [str(seen) for seen in family.left(_numbers(folder))]
        fate.stayed = self._device.stayed(family.pids(), fate.ended + GONE_WITHIN)
        fate.bystanders = bystanders(folder)
        self._wait_for(family, folder, time.time() + _LATE)

    def _wait_for(self, family: Family, folder: Path, end: float) -> None:
        while not self.closed.is_set():
            family.look()
            if time.time() > end or not family.left(_numbers(folder)):
                return
            time.sleep(_LOOK)


def _notes(diary: Path) -> list[dict[str, Any]]:
    if not diary.exists():
        return []
    # The last line may be in the middle of being written.
    lines = diary.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _numbers(folder: Path) -> set[int]:
    return {bystander.pid for bystander in bystanders(folder)}
