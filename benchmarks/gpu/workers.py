"""Workers of pytest-xdist on GPUs: each on its own, several on one, tests over two, killed, leaking, isolated, hosts.

    python benchmarks/gpu/workers.py --results workers.json
    python benchmarks/gpu/workers.py --results workers.json --only speed,mixed

With two GPUs all cases run, with one (CUDA_VISIBLE_DEVICES=1, say) those that need no second one. "Hosts" are two
gateways with different devices.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import IN_CHILDREN, IN_PROCESS, Device, Results, tiny_llama
from runs import Run, pytest_run

WORTH = 0.6  # of the time of one worker, at most, for two
LIMIT = 540.0  # seconds for one run
_FOUR = " or ".join(f"test_engine[{number}]" for number in range(4))
Note = dict[str, Any]


class Lab:
    """Runs the inner suite and looks at what it has noted."""

    def __init__(self, folder: Path, device: Device, tests: int) -> None:
        self.uuids = device.uuids
        self.tests = tests
        self.warm = False
        self._folder = folder
        self._numbers = itertools.count(1)
        self._environ = {
            **IN_CHILDREN,
            "BENCHMARK_MODEL": tiny_llama(),
            "BENCHMARK_ENGINE": json.dumps(device.engine()),
            "BENCHMARK_TESTS": str(tests),
        }

    def run(self, choice: str, *arguments: str, **environ: str) -> tuple[dict[str, Any], list[Note]]:
        """Run what ``-k`` chooses; return the figures of the run, and all notes."""
        folder = self._folder / str(next(self._numbers))
        with pytest_run(folder, "workers.py", {**self._environ, **environ}, "-k", choice, *arguments) as run:
            run.watch(lambda: None, LIMIT)
            ended = run.process.poll()
            seconds = _seconds(run)
            notes, output = run.notes(), run.output()
        # The controller notes each report that reaches it, and each worker its own.
        reports = [note for note in notes if note["event"] == "report" and note["pid"] == run.process.pid]
        outcomes = collections.Counter(_outcome(report) for report in reports if _counts(report))
        failed = {_phase(note): [*note["causes"], note["text"]] for note in reports if _outcome(note) == "failed"}
        said = {_phase(note): note["causes"] for note in reports if note["causes"] and _outcome(note) != "failed"}
        record = {"exit_status": ended, "seconds": seconds, "outcomes": dict(outcomes), "hung": ended is None}
        self.warm |= bool(outcomes["passed"])
        if ended not in (0, 1):
            print(output[-4000:], file=sys.stderr)
        texts = {name: found for name, found in (("failed", failed), ("said", said)) if found}
        starts = _starts(notes)
        middle = {"median_seconds_of_a_start": round(statistics.median(starts), 2)} if starts else {}
        return {**record, **middle, "tail": output.splitlines()[-1:], **texts}, notes


def _phase(note: Note) -> str:
    return f"{note['test']} ({note['when']})"


def _seconds(run: Run) -> float:
    ends = [note["time"] for note in run.notes()]
    return round(max(ends) - run.began, 2) if ends else 0.0


def _periods(notes: list[Note], *events: str) -> list[tuple[int, float, float]]:
    """Return the process, the beginning and the end of each start of an engine that ended so."""
    begun = {(note["pid"], note["engine"]): note["time"] for note in notes if note["event"] == "starts"}
    ends = [note for note in notes if note["event"] in events]
    return [(note["pid"], begun[note["pid"], note["engine"]], note["time"]) for note in ends]


def _starts(notes: list[Note]) -> list[float]:
    return [end - begin for _, begin, end in _periods(notes, "up")]


def _counts(report: Note) -> bool:
    return report["when"] in ("call", "???") or report["outcome"] != "passed"


def _outcome(report: Note) -> str:
    leaked = report["when"] == "teardown" and report["properties"].get("gpu_memory_outcome") == "leaked"
    return "leaked" if leaked else "crashed" if report["when"] == "???" else report["outcome"]


def _devices(notes: list[Note]) -> dict[str, list[str]]:
    """Return on which devices each worker's engines were."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for note in notes:
        if note["event"] == "engine" and "worker" in note:
            found[note["worker"]].update(note["on"])
    return {worker: sorted(uuids) for worker, uuids in sorted(found.items())}


def _met(notes: list[Note]) -> int:
    return max((note["met"] for note in notes if note["event"] in ("begins", "ends")), default=0)


def _overlaps(notes: list[Note], alone: str) -> int:
    """Count tests that met one that was to be alone."""
    periods, running = [], {}
    for note in sorted(notes, key=lambda note: note["time"]):
        if note["event"] == "begins":
            running[note["pid"]] = note
        elif note["event"] == "ends" and note["pid"] in running:
            begun = running.pop(note["pid"])
            periods.append((begun["time"], note["time"], begun["test"], frozenset(begun["uuids"])))
    pairs = itertools.combinations(periods, 2)
    return sum(
        a[0] < b[1] and b[0] < a[1] and bool(a[3] & b[3]) and any(name.startswith(alone) for name in (a[2], b[2]))
        for a, b in pairs
    )


def speed(lab: Lab) -> dict[str, Any]:
    """One worker against two, each of which has its own device; when caches are warm."""
    if not lab.warm:
        lab.run("test_engine[0]", "-n", "1")
    one, _ = lab.run("test_engine[", "-n", "1")
    two, notes = lab.run("test_engine[", "-n", "gpu")
    devices, ratio = _devices(notes), two["seconds"] / (one["seconds"] or 1.0)
    own = sorted(uuid for uuids in devices.values() for uuid in uuids) == sorted(lab.uuids[: len(devices)])
    clean = one["outcomes"] == two["outcomes"] == {"passed": lab.tests}
    return {
        "one_worker": one,
        "a_worker_a_gpu": two,
        "ratio": round(ratio, 3),
        "devices": devices,
        "bytes_of_others_met": _met(notes),
        "passed": clean and own and len(devices) == 2 and not _met(notes) and ratio <= WORTH,
    }


def visible(lab: Lab) -> dict[str, Any]:
    """The caller's list in other forms: one device, in reverse, by UUID, by the beginning of a UUID."""
    first, second = lab.uuids[:2]
    short = next(second[:size] for size in range(8, len(second) + 1) if not first.startswith(second[:size]))
    forms = {"1": [second], "1,0": [second, first], f"{second},{first}": [second, first], short: [second]}
    records = []
    for value, expected in forms.items():
        record, notes = lab.run("test_engine[0] or test_engine[1]", "-n", "gpu", CUDA_VISIBLE_DEVICES=value)
        devices = _devices(notes)
        right = all(uuids == [expected[int(worker[2:])]] for worker, uuids in devices.items())
        fine = right and len(devices) == len(expected) and record["outcomes"] == {"passed": 2}
        records.append({"CUDA_VISIBLE_DEVICES": value, "devices": devices, **record, "passed": fine})
    return {"forms": records, "passed": all(record["passed"] for record in records)}


def mixed(lab: Lab) -> dict[str, Any]:
    """Tests over two devices among others: once with engines, twenty times without."""
    engines, notes = lab.run(f"{_FOUR} or test_engine_over_two", "-n", "gpu")
    both = [note["on"] for note in notes if note["event"] == "engine" and note["test"] == "test_engine_over_two"]
    met = _overlaps(notes, "test_engine_over_two")
    fine = both == [sorted(lab.uuids[:2])] and not met and engines["outcomes"] == {"passed": 5}
    light = []
    for _ in range(20):
        record, notes = lab.run("test_light", "-n", "gpu", "--maxschedchunk=1")
        light.append({**record, "met": _overlaps(notes, "test_light_on_two")})
    right = all(not record["met"] and record["outcomes"] == {"passed": 30} for record in light)
    return {"with_engines": {**engines, "met": met, "on": both}, "without": light, "passed": fine and right}


def shared(lab: Lab) -> dict[str, Any]:
    """Four workers on one device, and one test that leaks."""
    first = lab.uuids[0]
    choice, options = "test_engine[ or test_leak", ("-n", "4", "--vllm-cleanup-gpus=auto")
    record, notes = lab.run(choice, *options, CUDA_VISIBLE_DEVICES=first, BENCHMARK_ENGINE=json.dumps(_SHARED))
    leaks = [note["test"] for note in notes if note["event"] == "report" and _outcome(note) == "leaked"]
    # Others on the device are met here; elsewhere nobody may be.
    fine = set(leaks) == {"test_leak"} and record["outcomes"] == {"passed": lab.tests + 1, "leaked": 1} and _met(notes)
    return {
        **record,
        "leaked": sorted(set(leaks)),
        "ports": sorted({note.get("port") for note in notes} - {None}),
        "bytes_of_others_met": _met(notes),
        "passed": bool(fine),
    }


def isolated(lab: Lab) -> dict[str, Any]:
    """Four workers on one device, with isolated tests whose engine is in their process, which ends with its context."""
    options, tests = ("-n", "4", "--vllm-cleanup-gpus=auto"), 8
    environ = {
        "CUDA_VISIBLE_DEVICES": lab.uuids[0],
        "BENCHMARK_ENGINE": json.dumps(_SHARED),
        "BENCHMARK_TESTS": str(tests),
    }
    record, notes = lab.run("test_isolated[", *options, **environ, **IN_PROCESS)
    left = [(note["pid"], note["time"]) for note in notes if note["event"] == "leaves"]
    periods = _periods(notes, "up", "failed")
    beside = sum(pid != starter and begin < moment < end for pid, moment in left for starter, begin, end in periods)
    fine = record["outcomes"] == {"passed": tests} and len(left) >= tests and not beside and _met(notes)
    return {**record, "processes_that_left": len(left), "left_beside_a_start": beside, "passed": bool(fine)}


_SHARED = {"max_model_len": 256, "enforce_eager": True, "max_num_seqs": 2}


def kills(lab: Lab) -> dict[str, Any]:
    """Ten workers killed in the middle of a test with an engine."""
    tests, killed = 12, [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    record, notes = lab.run(
        "test_engine[",
        *("-n", "gpu", "--max-worker-restart=20"),
        BENCHMARK_TESTS=str(tests),
        BENCHMARK_KILLS=",".join(map(str, killed)),
    )
    outcomes = {"passed": tests - len(killed), "crashed": len(killed)}
    fine = record["outcomes"] == outcomes and not _met(notes)
    return {
        **record,
        "killed": len(killed),
        "bytes_of_others_met": _met(notes),
        "devices": _devices(notes),
        "passed": fine,
    }


def restart(lab: Lab) -> dict[str, Any]:
    """A worker that leaks is replaced, and the rest runs clean."""
    options = ("-n", "1", "--vllm-cleanup-gpus=auto", "--vllm-cleanup-on-leak=restart")
    record, notes = lab.run("test_leak or test_light[ or test_engine[0]", *options)
    begun = [note for note in notes if note["event"] == "begins"]
    leaker = {note["pid"] for note in begun if note["test"] == "test_leak"}
    others = {note["pid"] for note in begun if note["test"] != "test_leak"}
    met, replaced = _met(notes), len(others) == 1 and leaker.isdisjoint(others)
    fine = record["outcomes"] == {"passed": 26, "leaked": 1} and replaced and not met
    return {**record, "replaced": replaced, "bytes_of_others_met": met, "passed": fine}


def hosts(lab: Lab) -> dict[str, Any]:
    """Two gateways with different devices, as two hosts have."""
    tx = [f"--tx=popen//env:CUDA_VISIBLE_DEVICES={value}" for value in ("1", "0")]
    record, notes = lab.run(_FOUR, "--dist=load", *tx, "--vllm-cleanup-gpus=auto")
    devices = _devices(notes)
    right = devices == {"gw0": [lab.uuids[1]], "gw1": [lab.uuids[0]]}
    return {**record, "devices": devices, "passed": right and record["outcomes"] == {"passed": 4}}


CASES: dict[str, tuple[int, Callable[[Lab], dict[str, Any]]]] = {
    "hosts": (2, hosts),
    "speed": (2, speed),
    "kills": (1, kills),
    "visible": (2, visible),
    "mixed": (2, mixed),
    "shared": (1, shared),
    "restart": (1, restart),
    "isolated": (1, isolated),
}


def _chosen(only: str, gpus: int) -> Iterator[tuple[str, Callable[[Lab], dict[str, Any]]]]:
    for name, (needed, case) in CASES.items():
        if gpus >= needed and (not only or name in only.split(",")):
            yield name, case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--only", default="", help=f"some of {','.join(CASES)}")
    parser.add_argument("--tests", type=int, default=16, help="how many tests with an engine")
    options = parser.parse_args()
    device = Device()
    if not device.names:
        parser.error("needs a GPU")
    results = Results(options.results, device, summary={}, cases={})
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), device, options.tests)
        for name, case in _chosen(options.only, len(device.names)):
            results.data["cases"][name] = case(lab)
            passed = {name: record["passed"] for name, record in results.data["cases"].items()}
            results.data["summary"] = {"cases": passed, "passed": all(passed.values())}
            results.write()
            print(name, json.dumps(results.data["cases"][name])[:2000], flush=True)
    print(json.dumps(results.data["summary"]))
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
