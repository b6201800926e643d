"""How long it takes to close an engine that lives in child processes.

    python benchmarks/closing.py --results closing.json

Pairs: two equal engines, one closed by close_engine(), the other by vLLM's own shutdown, each until its processes have
ended and the driver lists them no more. close_engine() may take 0.2 s longer, by the median of the differences.

Held: engines of tests that end while something still refers to them. On a GPU the teardown has to take less than 2 s.
On the processor there is no limit, since vLLM's own shutdown takes 4 s there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import IN_CHILDREN, LIMIT, QUIET, Device, Results, tiny_llama
from runs import Family, Process, pytest_run

os.environ.update(QUIET | IN_CHILDREN)  # before vLLM is imported

from pytest_vllm_cleanup import close_engine

MOST_OVER = 0.2  # seconds over vLLM's own shutdown
MOST_AT_TEARDOWN = 2.0  # seconds, on a GPU
HELD = ("test_stray_reference", "test_reference_cycle", "test_module_global", "test_plain_local")


class Pairs:
    """Closes engines in turns.

    Args:
        device: what they run on.
        model: path of the model.
    """

    def __init__(self, device: Device, model: str) -> None:
        self.device = device
        self.model = model
        self.family = Family(os.getpid())
        self.listed: bool | None = None  # whether the driver told the engine's processes while they ran

    def pair(self, number: int) -> dict[str, Any]:
        """Close one engine in each way; which way goes first changes from pair to pair."""
        ways = (self.ours, self.own) if number % 2 == 0 else (self.own, self.ours)
        found = {way.__name__: way() for way in ways}
        difference = round(found["ours"]["seconds"] - found["own"]["seconds"], 4)
        return {"first": ways[0].__name__, **found, "difference": difference}

    def ours(self) -> dict[str, Any]:
        """Close an engine with close_engine()."""
        llm, processes, before = self.build()
        started = time.monotonic()
        report = close_engine(llm)
        record = self.until_gone(started, processes, before)
        steps = {name: round(seconds, 4) for name, seconds, _ in report.steps}
        return {**record, "steps": steps, "errors": report.errors}

    def own(self) -> dict[str, Any]:
        """Close an engine with vLLM's own shutdown."""
        llm, processes, before = self.build()
        started = time.monotonic()
        llm.llm_engine.engine_core.shutdown()
        record = self.until_gone(started, processes, before)
        close_engine(llm)  # for the records of the plugin, which would take it for a living one
        return record

    def build(self) -> tuple[Any, set[Process], list[int] | None]:
        """Build an engine and use it; return it with its processes, and what was in use on the device before."""
        from vllm import LLM, SamplingParams

        before, others = self.device.used(), self.family.look()
        llm = LLM(self.model, seed=0, disable_log_stats=True, **self.device.engine())
        llm.generate(["The engine gives its memory back"], SamplingParams(max_tokens=16), use_tqdm=False)
        processes = self.family.look() - others
        self.listed = bool(self.device.pids() & {process.pid for process in processes}) if self.device.names else None
        return llm, processes, before

    def until_gone(self, started: float, processes: set[Process], before: list[int] | None) -> dict[str, Any]:
        """Wait until an engine's processes have ended and the driver does not list them; return how long all took."""
        returned = time.monotonic()
        pids = {process.pid for process in processes}
        while any(process.runs() for process in processes) and time.monotonic() < returned + LIMIT:
            time.sleep(0.002)
        ended = time.monotonic()
        while self.device.names and pids & self.device.pids() and time.monotonic() < returned + LIMIT:
            time.sleep(0.002)
        done = time.monotonic()
        return {
            "seconds": round(done - started, 4),
            "seconds_until_returned": round(returned - started, 4),
            "seconds_until_ended": round(ended - started, 4),
            "processes": len(processes),
            "listed_by_driver": self.listed,
            "left": sum(process.runs() for process in processes),
            "device_bytes_stayed": self.device.stayed(before),
        }


def held(device: Device, model: str, folder: Path) -> list[dict[str, Any]]:
    """Run the tests of inner/held.py, and look what is left after each while that pytest still lives."""
    environ = {
        **IN_CHILDREN,
        "BENCHMARK_MODEL": model,
        "BENCHMARK_ENGINE": json.dumps(device.engine()),
        "BENCHMARK_HOLD": "60",
    }
    records = []
    before = device.used()
    with pytest_run(folder / "held", "held.py", environ) as run:
        for test in HELD:
            if not run.watch(lambda test=test: run.noted("report", test=test, when="teardown")):
                break
            reports = {note["when"]: note for note in run.notes() if note["event"] == "report" and note["test"] == test}
            gone = run.engines_gone(time.monotonic())
            records.append(
                {
                    "test": test,
                    "outcomes": {when: note["outcome"] for when, note in reports.items()},
                    "call_seconds": round(reports["call"]["seconds"], 3),
                    "teardown_seconds": round(reports["teardown"]["seconds"], 3),
                    "processes_left": gone is None,
                    "device_bytes_stayed": device.stayed(before),
                }
            )
            print(json.dumps(records[-1]), flush=True)
            run.go(test)
        run.watch(lambda: False)
        closed = {note["test"]: note for note in run.notes() if note["event"] == "closed"}
        for record in records:
            # What the plugin itself says; for an engine of the test's own, how long dropping it took.
            facts = closed.get(record["test"], {})
            record |= {
                "close_seconds": facts.get("seconds"),
                "steps": facts.get("steps"),
                "errors": facts.get("errors"),
            }
        if run.process.poll() != 0:
            print(run.output()[-6000:], file=sys.stderr)
    return records


def held_as_it_should(device: Device, record: dict[str, Any]) -> bool:
    """Whether an engine that something held was closed, in time."""
    closed = set(record["outcomes"].values()) == {"passed"} and not record["processes_left"] and not record["errors"]
    in_time = not device.names or record["teardown_seconds"] < MOST_AT_TEARDOWN
    return closed and in_time and not any(record["device_bytes_stayed"] or ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--pairs", type=int, default=7, help="how many pairs of engines (default: 7)")
    options = parser.parse_args()
    device, model = Device(), tiny_llama()
    pairs: list[dict[str, Any]] = []
    results = Results(options.results, device, summary={}, held=[], pairs=pairs)
    with tempfile.TemporaryDirectory() as folder:
        results.data["held"] = held(device, model, Path(folder))
        results.write()
    bench = Pairs(device, model)
    bench.ours()  # the first one pays for what all share
    for number in range(options.pairs):
        pairs.append(bench.pair(number))
        results.write()
        print(json.dumps(pairs[-1]), flush=True)
    over = statistics.median(pair["difference"] for pair in pairs)
    ways = [pair[way] for pair in pairs for way in ("ours", "own")]
    clean = not any(way["left"] or any(way["device_bytes_stayed"] or ()) or way.get("errors") for way in ways)
    freed = [held_as_it_should(device, record) for record in results.data["held"]]
    results.data["summary"] = {
        "median_seconds_ours": statistics.median(pair["ours"]["seconds"] for pair in pairs),
        "median_seconds_own": statistics.median(pair["own"]["seconds"] for pair in pairs),
        "median_seconds_over": over,
        "most_seconds_over": MOST_OVER,
        "max_teardown_seconds": max((record["teardown_seconds"] for record in results.data["held"]), default=None),
        "most_teardown_seconds": MOST_AT_TEARDOWN if device.names else None,
        "passed": over <= MOST_OVER and clean and len(freed) == len(HELD) and all(freed),
    }
    results.write()
    print(json.dumps(results.data["summary"], indent=1))
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
