"""Kill a running pytest with SIGKILL, many times in a row, and see what stays of its engine.

    python benchmarks/kills.py --results kills.json

Each round starts a pytest whose test builds an engine and generates. It is killed at a moment drawn over its life:
while it imports, while the engine starts, while it generates. Every process that it has started must be gone, and
every byte that they held on the device back, within 10 s. A pytest that nobody kills must work before and after.

A run that is stopped by --seconds goes on where it was when it is called again with the same results file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import IN_CHILDREN, IN_PROCESS, LIMIT, LOOK, Device, Results, tiny_llama
from runs import Run, pytest_run

PHASES = ("importing", "building", "generating")
MODES = {"process": IN_CHILDREN, "in-process": IN_PROCESS}
GENERATING = 2.0  # seconds over which the moments are drawn while it generates


class Killer:
    """Plays the rounds.

    Args:
        options: see main().
        folder: where the inner runs write.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.device = Device()
        self.environ = {
            **MODES[options.mode],
            "BENCHMARK_MODEL": tiny_llama(),
            "BENCHMARK_ENGINE": json.dumps(self.device.engine()),
        }
        known = json.loads(options.results.read_text()) if options.results.exists() else {}
        self.rounds: list[dict[str, Any]] = known.get("rounds", [])
        self.clean_runs: list[dict[str, Any]] = known.get("clean_runs", [])
        setting = {"mode": options.mode, "seed": options.seed}
        if known and setting != {name: known[name] for name in setting}:
            raise SystemExit(f"{options.results} is of a run with another mode or seed")
        runs = {"clean_runs": self.clean_runs, "rounds": self.rounds}
        self.results = Results(options.results, self.device, **setting, summary={}, **runs)

    def run(self) -> bool:
        """Play the rounds that are missing; return whether all is as it should be."""
        deadline = time.monotonic() + self.options.seconds
        lengths = self.clean("before")
        number = len(self.rounds)
        while lengths is not None and number < self.options.rounds and time.monotonic() < deadline:
            number += 1
            self.rounds.append(self.round(number, lengths))
            self.summarize()
            print(json.dumps(self.rounds[-1]), flush=True)
        self.clean("after")
        return self.summarize()

    def clean(self, when: str) -> dict[str, float] | None:
        """Play a run that nobody kills; return how long each of its phases took, in seconds, None if it failed."""
        with self.start(f"clean_{when}", seconds=1.0) as run:
            run.watch(lambda: False)
            gone = run.family.gone(time.monotonic())
            marks = [run.noted(event) for event in PHASES[1:]]
            record = {
                "when": when,
                "exit_status": run.process.poll(),
                "engine_started": marks[1] is not None,
                "seconds": round(time.monotonic() - run.began, 2),
                "seconds_until_gone": None if gone is None else round(gone, 3),
                "device_bytes_stayed": self.stayed(run, LIMIT),
            }
            record["works"] = record["exit_status"] == 0 and gone is not None and not record["device_bytes_stayed"]
            if not record["works"]:
                print(run.output()[-6000:], file=sys.stderr)
        self.clean_runs.append(record)
        self.results.write()
        if marks[0] is None or marks[1] is None:
            return None
        building, generating = marks[0]["time"] - run.began, marks[1]["time"] - marks[0]["time"]
        return {"importing": building, "building": generating, "generating": GENERATING}

    def round(self, number: int, lengths: dict[str, float]) -> dict[str, Any]:
        """Play a run that is killed.

        Args:
            number: of the round; decides the moment, so that it is the same at every call.
            lengths: seconds that each phase takes.
        """
        aimed = PHASES[(number - 1) % len(PHASES)]
        delay = random.Random(f"{self.options.seed}/{number}").random() * lengths[aimed]
        with self.start(f"round_{number}", seconds=600.0) as run:
            # The first phase begins with the process, the others with what it notes.
            if aimed == PHASES[0] or run.watch(lambda: run.noted(aimed)):
                end = time.monotonic() + delay
                run.watch(lambda: time.monotonic() >= end)
            status = run.process.poll()
            if status is not None:
                print(run.output()[-6000:], file=sys.stderr)
            running = len(run.family.look())
            held = self.device.held(run.pids)
            phase = phase_of(run)
            run.process.kill()
            killed = time.monotonic()
            run.process.wait()
            gone = run.family.gone(killed)
            left = run.family.look() if gone is None else set()
            stayed = self.stayed(run, max(0.0, killed + LIMIT - time.monotonic()))
            names = [f"{process.pid} {process.command[:60]}" for process in left]
            seen = len(run.family.members)
        return {
            "round": number,
            "phase": phase,
            "seconds_into_run": round(killed - run.began, 2),
            "processes_seen": seen,
            "running_when_killed": running,
            "seconds_until_gone": None if gone is None else round(gone, 3),
            "orphans": len(left),
            "device_bytes_when_killed": held,
            "device_bytes_stayed": stayed,
            **({"left": names} if names else {}),
            **({} if status is None else {"had_ended_by_itself_with": status}),
        }

    def stayed(self, run: Run, limit: float) -> int | None:
        """Wait until a run's processes hold nothing on the device, and return what they do at the end of the limit."""
        deadline = time.monotonic() + limit
        held = self.device.held(run.pids)
        while held and time.monotonic() < deadline:
            time.sleep(LOOK)
            held = self.device.held(run.pids)
        return held

    def start(self, name: str, seconds: float) -> Any:
        """Start a pytest that generates for so many seconds."""
        return pytest_run(self.folder / name, "killed.py", {**self.environ, "BENCHMARK_GENERATE": str(seconds)})

    def summarize(self) -> bool:
        """Write all that is known; return whether it is as it should be."""
        orphans = sum(record["orphans"] for record in self.rounds)
        stayed = [record["device_bytes_stayed"] for record in self.rounds]
        times = [record["seconds_until_gone"] for record in self.rounds]
        missed = [record["round"] for record in self.rounds if "had_ended_by_itself_with" in record]
        enough = len(self.rounds) >= self.options.rounds and self.clean_runs[-1]["when"] == "after"
        works = all(run["works"] for run in self.clean_runs)
        fine = enough and works and not (orphans or any(stayed) or missed)
        self.results.data["summary"] = {
            "rounds": len(self.rounds),
            "by_phase": {name: sum(record["phase"] == name for record in self.rounds) for name in PHASES},
            "orphans": orphans,
            "device_bytes_stayed": sum(stayed) if self.device.names else None,
            "max_seconds_until_gone": None if None in times else max(times, default=None),
            "not_killed": missed,
            "clean_runs_work": works,
            "passed": fine,
        }
        self.results.write()
        return fine


def phase_of(run: Run) -> str:
    """Return which phase a run is in, by what it has noted last."""
    return next((name for name in reversed(PHASES) if run.noted(name)), PHASES[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--rounds", type=int, default=30, help="how many kills in all (default: 30)")
    parser.add_argument("--mode", choices=MODES, default="process", help="where the engine lives (default: process)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further round after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(options, Path(folder))
        fine = killer.run()
    print(json.dumps(killer.results.data["summary"], indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
