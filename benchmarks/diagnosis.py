"""What it costs to say who holds a leak, with two million live objects: seconds, and memory on top of what is used.

The leak is at the end of a chain of ten objects. Each shape of the two million has a fresh process. It fails above the
limits, or if the holder is not named.

Usage: python benchmarks/diagnosis.py --results diagnosis_cpu.json
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Device, Results

OBJECTS = 2_000_000
LENGTH = 10
LIMIT_SECONDS = 5.0
LIMIT_MIB = 50.0
MIB = 2**20
EXPECTED = "benchmarks/diagnosis.py: module global CACHE['llm'] -> Link.held['next'][0] -> Link.held['next'][0] -> ..."
CACHE: dict[str, Any] = {}


class Link:
    def __init__(self, held: object) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Leak:
    pass


def chain(leak: object) -> object:
    """Put a leak behind ten objects, with a dictionary and a list between every two."""
    for _ in range(LENGTH):
        leak = Link({"next": [leak]})
    return leak


def crowd(make: Callable[[Any], Any]) -> list[Any]:
    """Make two million objects, and a list that has them."""
    shared: list[int] = []  # without it, nothing in them would interest the garbage collector
    return [make(shared) for _ in range(OBJECTS)]


def in_circles(_: Any) -> list[Any]:
    """Make two million objects in a thousand circles."""
    rings = []
    for _number in range(1000):
        ring = [Link(None) for _ in range(OBJECTS // 1000)]
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
            one.held = other
        rings.append(ring[0])
    return rings


SHAPES: dict[str, Callable[[Any], Any]] = {
    "instances": lambda _: crowd(Link),
    "instances with slots": lambda _: crowd(Slotted),
    "dictionaries": lambda _: crowd(lambda shared: {"a": shared}),
    "lists": lambda _: crowd(lambda shared: [shared]),
    "tuples": lambda _: crowd(lambda shared: (shared, 1)),
    "values of one dictionary": lambda _: dict(enumerate(crowd(Link))),
    "circles": in_circles,
    "users of the leak": lambda leak: crowd(lambda _: [leak]),
    "objects that the leak holds": lambda leak: setattr(leak, "all", collections.deque(crowd(Link))),
}


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def one(shape: str) -> dict[str, Any]:
    """Search in this process."""
    from pytest_vllm_cleanup.diagnosis.chains import find_chains

    gc.disable()  # it would double the time that building takes
    leak = Leak()
    CACHE["llm"] = chain(leak)
    others = SHAPES[shape](leak)
    gc.enable()
    gc.collect()
    targets = [leak]
    del leak
    before = resident()
    start = time.perf_counter()
    found = find_chains(targets, deadline=time.monotonic() + LIMIT_SECONDS, base=str(Path(__file__).parent.parent))
    seconds = time.perf_counter() - start
    # What building has taken and given back counts, too; so the search has taken this or less.
    peak = max(resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    del others
    return {
        "shape": shape,
        "seconds": round(seconds, 3),
        "extra_mib": round(max(0, peak - before) / MIB, 1),
        "resident_mib": round(before / MIB),
        "chain": str(found[0]),
    }


def is_good(figures: dict[str, Any]) -> bool:
    """Whether the figures are within the limits and the holder was found."""
    # Where all of them hold the leak, the list that has them is as good an answer.
    expected = "local others[0][0] of frame one" if figures["shape"] == "users of the leak" else EXPECTED
    return (
        figures["chain"].startswith(expected)
        and figures["seconds"] < LIMIT_SECONDS
        and figures["extra_mib"] < LIMIT_MIB
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--repeat", type=int, default=3, help="processes for each shape (default: 3)")
    parser.add_argument("--one", choices=SHAPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return 0
    limits = {"seconds": LIMIT_SECONDS, "extra_mib": LIMIT_MIB}
    results = Results(arguments.results, Device(), objects=OBJECTS, limits=limits) if arguments.results else None
    runs: list[dict[str, Any]] = []
    for shape in SHAPES:
        for _ in range(arguments.repeat):
            command = [sys.executable, __file__, "--one", shape]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout))
            print(f"{shape}: {runs[-1]['seconds']} s, {runs[-1]['extra_mib']} MiB: {runs[-1]['chain']}", flush=True)
        if results is not None:
            results.data["runs"] = runs
            results.write()
    worst = {name: max(run[name] for run in runs) for name in limits}
    print(f"median: {statistics.median(run['seconds'] for run in runs):.2f} s; worst: {worst}")
    if results is not None:
        results.data |= {"worst": worst, "passed": all(map(is_good, runs))}
        results.write()
    return 0 if all(map(is_good, runs)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
