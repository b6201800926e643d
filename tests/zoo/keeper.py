"""Starts the inner runs that the selected tests ask for: each once, the longest first."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import unmeasured

from pytest_vllm_cleanup.testing import tiny_model

from .catalogue import KINDS, ROOT
from .inner import InnerRun, Run
from .results import Results
from .tenant import Tenant

LIMIT = 300.0  # seconds for one inner run; on an idle machine none takes half as long
_STUCK = 120  # seconds for one test, after which its stacks are printed
_LOOK = 0.1  # seconds
_CUT_SHORT = "the search was cut short"


class Keeper:
    """Starts to run at once, and has the results when they are asked for.

    Args:
        folder: an empty folder.
        results: learns what was said of each kind.
        runs: what is to be run. They wait most of the time; on a GPU one at a time, since they would see each other.
    """

    def __init__(self, folder: Path, results: Results, runs: Iterable[Run]) -> None:
        wanted = sorted(set(runs), key=lambda run: -run.seconds)
        on_gpu = any(run.device == "cuda" for run in wanted)
        self._folder = folder
        self._results = results
        self._closed = threading.Event()
        self._tenant = Tenant(folder / "tenant") if on_gpu else None
        self._executor = ThreadPoolExecutor(1 if on_gpu else 2)
        self._runs: dict[Run, Future[InnerRun]] = {run: self._executor.submit(self._play, run) for run in wanted}

    def outcome(self, run: Run) -> InnerRun:
        """Return what came of a run, when it is over."""
        return self._runs[run].result()

    def close(self) -> None:
        """End what is running, start no more, and end the process that stands for another tenant of the device."""
        self._closed.set()
        self._executor.shutdown(cancel_futures=True)
        if self._tenant is not None:
            self._tenant.end()

    def _play(self, run: Run) -> InnerRun:
        name = "".join(letter if letter.isalnum() else "_" for letter in run.name)
        made = self._play_once(run, self._folder / name)
        cut_short = (kind for kind in run.kinds if _CUT_SHORT in json.dumps(made.said(kind)))
        if any(made.problems(kind) for kind in cut_short):
            # The search for holders has 5 s, which a machine that is busy, and measured by coverage, may need more of.
            made = self._play_once(run, self._folder / f"{name}_again")
        self._results.add(made)
        return made

    def _play_once(self, run: Run, folder: Path) -> InnerRun:
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        made, began = InnerRun(run), time.monotonic()
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                self._command(folder, run),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ(folder, run),
                cwd=ROOT,
            )
        try:
            while process.poll() is None and time.monotonic() < began + LIMIT and not self._closed.is_set():
                time.sleep(_LOOK)
            made.status = process.poll()
            if made.status is None:
                process.terminate()  # it ends its own processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        finally:
            process.kill()
            process.wait()
        made.seconds = time.monotonic() - began
        made.output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        diary = folder / "diary"
        made.notes = [json.loads(line) for line in diary.read_text("utf-8").splitlines()] if diary.exists() else []
        return made

    def _command(self, folder: Path, run: Run) -> list[str]:
        installed = any(point.name == "vllm_cleanup" for point in metadata.entry_points(group="pytest11"))
        return [
            *(sys.executable, "-m", "pytest", "-v", "--color=no", f"--rootdir={ROOT}", f"--confcutdir={KINDS}"),
            *("-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", "-p", "zoo_diary"),
            *("--continue-on-collection-errors", "-o", f"faulthandler_timeout={_STUCK}"),
            *("-o", "faulthandler_exit_on_timeout=true"),  # heeded by pytest 9
            *("-p", "vllm_cleanup" if installed else "pytest_vllm_cleanup.plugin"),
            *(str(kind.file.relative_to(ROOT)) for kind in run.kinds),
        ]

    def _environ(self, folder: Path, run: Run) -> dict[str, str]:
        paths = [str(KINDS), os.environ.get("PYTHONPATH", ""), str(ROOT)]
        # Always the same path: it is part of the key under which vLLM caches compiled code.
        model = tiny_model(Path(tempfile.gettempdir()) / f"pytest-vllm-cleanup-{getpass.getuser()}" / "llama")
        return {
            **(unmeasured.environment() if run.environ else os.environ),  # what says where engines live
            "COLUMNS": "200",
            "HF_HUB_OFFLINE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "ZOO_DEVICE": run.device,
            "ZOO_DIARY": str(folder / "diary"),
            "ZOO_MODEL": str(model),
            "ZOO_TENANT": str(self._folder / "tenant"),
            **dict(run.environ),
        }
