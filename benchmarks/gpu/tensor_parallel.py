"""Engines over two devices: closed, left by a failing test, orphaned by SIGKILL, and with a worker that was killed.

    python benchmarks/gpu/tensor_parallel.py --results tensor_parallel.json

Each case is a pytest of its own whose engine has tensor_parallel_size=2. Within 10 s of its test, no process of the
engine may be left and each device has to be back at what it was; where pytest survives, it waits meanwhile, so that
its own end does not help. The engine of the next case has to start; the last case is there for that.

Without a GPU the workers share the processor, and there are no figures of devices.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import IN_CHILDREN, LIMIT, Device, Results, tiny_llama
from runs import Process, Run, pytest_run

WORKERS = 2
HIT_AFTER = 1.0  # seconds of generating


def workers(run: Run) -> list[Process]:
    """Return the engine's workers, by the titles that they give themselves."""
    return sorted(process for process in run.family.look() if process.command.startswith("VLLM::Worker"))


def kill_pytest(run: Run) -> None:
    run.process.kill()
    run.process.wait()


def kill_worker(run: Run) -> None:
    for worker in workers(run)[-1:]:
        worker.kill()


@dataclass(frozen=True)
class Case:
    """What is to happen.

    Attributes:
        name: in a few words.
        test: of inner/parallel.py.
        status: the exit status that is right.
        hit: what happens to it while it generates.
    """

    name: str
    test: str
    status: int
    hit: Callable[[Run], None] | None = None

    @property
    def survives(self) -> bool:
        """Whether pytest comes to the test's teardown."""
        return self.hit is not kill_pytest


CASES = (
    Case("clean close", "test_passes", 0),
    Case("failing test", "test_fails", 1),
    Case("SIGKILL of pytest", "test_is_hit", -signal.SIGKILL, kill_pytest),
    Case("SIGKILL of one worker", "test_is_hit", 1, kill_worker),
    Case("clean close after all", "test_passes", 0),
)


def play(case: Case, device: Device, run: Run, before: list[int] | None) -> dict[str, Any]:
    """Watch a case to its end; return what became of it.

    Args:
        case: which one.
        device: what the engine runs on.
        run: its pytest, just started.
        before: the bytes in use on each device before that.
    """
    run.watch(lambda: run.noted("generating") or run.noted("report", when="teardown"))
    started = run.noted("generating") is not None
    seconds = time.monotonic() - run.began
    seen, used = len(workers(run)), device.used()
    if started and case.hit is not None:
        end = time.monotonic() + HIT_AFTER
        run.watch(lambda: time.monotonic() >= end)
        case.hit(run)
    hit = time.monotonic()
    if case.survives:
        run.watch(lambda: run.noted("report", when="teardown"))
    over = time.monotonic()
    gone = run.engines_gone(over)
    all_gone = None if case.survives else run.family.gone(over)
    stayed = device.stayed(before, max(0.0, over + LIMIT - time.monotonic()))
    left = [f"{process.pid} {process.command[:60]}" for process in run.family.look() if not run.of_the_run(process)]
    run.go(case.test)
    run.watch(lambda: False)
    if case.survives:
        all_gone = run.family.gone(time.monotonic())
    reports = {note["when"]: note for note in run.notes() if note["event"] == "report"}
    return {
        "case": case.name,
        "exit_status": run.process.poll(),
        "engine_started": started,
        "seconds_until_started": round(seconds, 2),
        "workers": seen,
        "device_bytes_of_engine": None if used is None or before is None else _difference(used, before),
        "outcomes": {when: note["outcome"] for when, note in reports.items()},
        "failure": reports["call"]["text"].strip().rpartition("\n")[2].rpartition("/")[2]
        if "call" in reports
        else None,
        "seconds_from_hit_to_end_of_test": round(over - hit, 2) if case.hit is kill_worker else None,
        "teardown_seconds": round(reports["teardown"]["seconds"], 3) if "teardown" in reports else None,
        "seconds_until_engine_gone": None if gone is None else round(gone, 3),
        "seconds_until_all_gone": None if all_gone is None else round(all_gone, 3),
        "left": left if gone is None else [],
        "device_bytes_stayed": stayed,
    }


def as_it_should(case: Case, record: dict[str, Any]) -> bool:
    """Whether a case went well and left nothing."""
    on_all = record["device_bytes_of_engine"] is None or all(grown > 0 for grown in record["device_bytes_of_engine"])
    right = record["exit_status"] == case.status and record["workers"] == WORKERS and on_all
    closed = not case.survives or record["outcomes"].get("teardown") == "passed"
    gone = None not in (record["seconds_until_engine_gone"], record["seconds_until_all_gone"])
    return record["engine_started"] and right and closed and gone and not any(record["device_bytes_stayed"] or ())


def _difference(one: list[int], other: list[int]) -> list[int]:
    return [now - then for now, then in zip(one, other, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    options = parser.parse_args()
    device = Device()
    if device.names and len(device.names) < WORKERS:
        parser.error(f"needs {WORKERS} GPUs, and there is {len(device.names)}")
    environ = {
        **IN_CHILDREN,
        "BENCHMARK_MODEL": tiny_llama(),
        "BENCHMARK_ENGINE": json.dumps({**device.engine(one_process=False), "tensor_parallel_size": WORKERS}),
        "BENCHMARK_HOLD": "60",
    }
    if not device.names:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM would want a NUMA node for each worker
    else:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:WORKERS])
    records: list[dict[str, Any]] = []
    results = Results(options.results, device, summary={}, cases=records)
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            before = device.used()
            name = "".join(letter if letter.isalnum() else "_" for letter in case.name)
            with pytest_run(Path(folder) / name, f"parallel.py::{case.test}", environ) as run:
                records.append(play(case, device, run, before))
                passed.append(as_it_should(case, records[-1]))
                if not passed[-1]:
                    print(run.output()[-6000:], file=sys.stderr)
            results.data["summary"] = {
                "cases": len(records),
                "failed": [record["case"] for record, fine in zip(records, passed, strict=True) if not fine],
                "passed": len(passed) == len(CASES) and all(passed),
            }
            results.write()
            print(json.dumps(records[-1]), flush=True)
    print(json.dumps(results.data["summary"]))
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
