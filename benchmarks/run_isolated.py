"""What run_isolated costs beyond the function's own work, and what is left of it: results of 1 GiB, and ways to die.

    python benchmarks/run_isolated.py --results run_isolated_cpu.json

A call is measured as the caller sees it. The function's own work is measured in its process (importing, and making the
result), or is known (a time limit). A result has to be copied from one process to the other, so the time that one
thread on this machine takes to copy 1 GiB stands beside it. It fails if an answer is wrong, or if a process or a
descriptor is left; without --any-time also if the median of a case takes 1 s or more beyond the function's own work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Device, Results
from runs import Family

from pytest_vllm_cleanup import IsolatedProcessError, IsolatedTimeoutError, run_isolated
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

GIB = 2**30
LIMIT = 1.0  # seconds beyond the function's own work
HANG = 1.0  # seconds until the time limit


class WithLock(Exception):
    def __init__(self) -> None:
        super().__init__("a lock does not pickle")
        self.lock = threading.Lock()


def nothing() -> tuple[float, None]:
    return 0.0, None


def some_bytes() -> tuple[float, bytes]:
    started = time.monotonic()
    data = b"x" * GIB
    return time.monotonic() - started, data


def an_array() -> tuple[float, Any]:
    started = time.monotonic()
    import numpy

    array = numpy.ones(GIB, dtype="u1")
    return time.monotonic() - started, array


def fail() -> None:
    raise WithLock


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def call_nothing() -> tuple[float, bool]:
    own, result = run_isolated(nothing)
    return own, result is None


def call_bytes() -> tuple[float, bool]:
    own, data = run_isolated(some_bytes)
    return own, len(data) == GIB and data[0] == data[-1] == ord("x")


def call_array() -> tuple[float, bool]:
    own, array = run_isolated(an_array)
    return own, bool(len(array) == GIB and array[0] == array[-1] == 1)


def call_fail() -> tuple[float, bool]:
    try:
        run_isolated(fail)
    except IsolatedProcessError as problem:
        return 0.0, "WithLock: a lock does not pickle" in str(problem) and "in fail" in str(problem.__cause__)
    return 0.0, False


def call_die() -> tuple[float, bool]:
    try:
        run_isolated(die)
    except IsolatedProcessError as problem:
        return 0.0, "killed by SIGKILL" in str(problem)
    return 0.0, False


def call_hang() -> tuple[float, bool]:
    try:
        run_isolated(hang, timeout=HANG)
    except IsolatedTimeoutError as problem:
        return HANG, "in hang" in str(problem)
    return HANG, False


CASES: dict[str, Callable[[], tuple[float, bool]]] = {
    "a function that does nothing": call_nothing,
    "1 GiB of bytes": call_bytes,
    "a numpy array of 1 GiB": call_array,
    "an exception with a state that does not pickle": call_fail,
    "a process that is killed by SIGKILL": call_die,
    "a time limit": call_hang,
}


def measured(call: Callable[[], tuple[float, bool]], family: Family) -> dict[str, Any]:
    """Call once, and look at once what is left."""
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    started = time.monotonic()
    own, right = call()
    seconds = time.monotonic() - started
    stay = {os.getpid(), current_watchdog().pid}
    left = [process.command for process in family.look() if process.pid not in stay]
    return {
        "seconds": round(seconds, 4),
        "own_seconds": round(own, 4),
        "beyond": round(seconds - own, 4),
        "right_answer": right,
        "processes_left": left,
        "descriptors_left": len(os.listdir("/proc/self/fd")) - descriptors,  # noqa: PTH208
    }


def copying() -> float:
    """Return how many seconds a copy of 1 GiB takes."""
    data = bytearray(GIB)
    started = time.monotonic()
    bytes(data)
    return round(time.monotonic() - started, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--runs", type=int, default=5, help="how often each case (default: 5)")
    parser.add_argument("--any-time", action="store_true", help="do not fail because of times: others use the machine")
    options = parser.parse_args()
    run_isolated(nothing)  # the first call pays for imports, and starts the watchdog's helper, which stays
    family = Family(os.getpid())
    cases: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    copies: list[float] = []
    results = Results(options.results, Device(), limit_seconds=LIMIT, summary={}, copy_1_gib=copies, cases=cases)
    for _ in range(options.runs):
        copies.append(copying())
        for name, call in CASES.items():
            cases[name].append(measured(call, family))
            results.write()
            print(name, json.dumps(cases[name][-1]), flush=True)
    summary = {
        name: {
            "median_beyond": statistics.median(run["beyond"] for run in runs),
            "worst_beyond": max(run["beyond"] for run in runs),
            "clean": all(
                run["right_answer"] and not run["processes_left"] and not run["descriptors_left"] for run in runs
            ),
        }
        for name, runs in cases.items()
    }
    results.data["summary"] = {"median_copy_1_gib": statistics.median(copies), **summary}
    results.write()
    print(json.dumps(results.data["summary"], indent=1))
    good = all(case["clean"] and (options.any_time or case["median_beyond"] < LIMIT) for case in summary.values())
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
