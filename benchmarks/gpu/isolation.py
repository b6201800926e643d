"""Isolated engine tests in a row: what they leave on the device, and how long they take beside a plain spawn.

    python benchmarks/gpu/isolation.py --results isolation.json

One run of pytest for each way: isolated with a warm spare, and each test as a plain new process that imports vLLM and
runs, as vLLM's own decorator for tests does. The same engine: built, used once, left to the end of its process. The
device is read from outside after each test's last report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import IN_PROCESS, LOOK, Device, Results, tiny_llama
from runs import Run, pytest_run

WARM = {"PYTEST_VLLM_CLEANUP_ISOLATE_WARM": "1"}
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "isolated, warm spare": ("isolated.py::test_isolated", WARM),
    "plain spawn": ("isolated.py::test_spawned", {}),
}
WANTED = 1.5  # times as fast as a plain spawn, with the warm spare
_SHARP = 16 << 20  # bytes that the driver's own figure may move


def reported(run: Run, when: str) -> list[dict[str, Any]]:
    """Return the reports of one phase of all tests, as pytest's own process has noted them."""
    return [n for n in run.notes() if n["event"] == "report" and n["when"] == when and n["pid"] == run.process.pid]


def play(run: Run, device: Device, limit: float) -> dict[str, Any]:
    """Watch a run to its end: when each test ended, and what was on the device then."""
    before, seen, more = device.used(), 0, []

    def look() -> bool:
        nonlocal seen
        now = len(reported(run, "teardown"))
        if now > seen:
            seen = now
            used = device.used()
            more.append(
                None if used is None or before is None else max(u - b for u, b in zip(used, before, strict=True))
            )
        return False

    run.watch(look, limit)
    look()
    notes, calls = reported(run, "teardown"), [note["seconds"] for note in reported(run, "call")]
    times = [note["time"] for note in notes]
    gone = run.family.gone(time.monotonic())
    return {
        "exit_status": run.process.poll(),
        "tests": len(notes),
        "seconds_to_the_first_end": round(times[0] - run.began, 2) if times else None,
        # The first one also pays for the start of pytest, and no spare can be ready for it.
        "seconds_a_test": round(statistics.mean(b - a for a, b in itertools.pairwise(times)), 2) if times[1:] else None,
        "of_which_the_call": round(statistics.mean(calls[1:]), 2) if calls[1:] else None,
        "more_on_the_device_after_each": more,
        "processes_gone_after_s": None if gone is None else round(gone, 2),
        "stayed_at_the_end": device.stayed(before),
    }


def summary(ways: dict[str, Any]) -> dict[str, Any]:
    """Compare the ways that have been run so far."""
    plain = ways.get("plain spawn", {}).get("seconds_a_test")
    factors = {
        way: round(plain / found["seconds_a_test"], 2)
        for way, found in ways.items()
        if plain and found["seconds_a_test"]
    }
    left = [
        bytes_ for found in ways.values() for bytes_ in found["more_on_the_device_after_each"] if bytes_ is not None
    ]
    clean = all(found["exit_status"] == 0 for found in ways.values())
    return {
        "times_as_fast_as_a_plain_spawn": factors,
        "most_left_after_a_test": max(left, default=None),
        "passed": clean and factors.get("isolated, warm spare", 0) >= WANTED and max(left, default=0) <= _SHARP,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--tests", type=int, default=20, help="with the warm spare; by plain spawn a fourth")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for one way")
    options = parser.parse_args()
    device = Device()
    results = Results(options.results, device, engine=device.engine(), ways={}, summary={})
    environ = {**IN_PROCESS, "BENCHMARK_MODEL": tiny_llama(), "BENCHMARK_ENGINE": json.dumps(device.engine())}
    with tempfile.TemporaryDirectory() as folder:
        for way, (test, variables) in WAYS.items():
            tests = options.tests if "warm" in way else max(3, options.tests // 4)
            variables = {**environ, **variables, "BENCHMARK_TESTS": str(tests)}
            with pytest_run(Path(folder) / way.replace(", ", "_").replace(" ", "_"), test, variables) as run:
                results.data["ways"][way] = play(run, device, options.limit)
                if run.process.poll() != 0:
                    print(run.output()[-3000:])
            results.data["summary"] = summary(results.data["ways"])
            results.write()
            time.sleep(LOOK)
    print(json.dumps(results.data["summary"]))
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
