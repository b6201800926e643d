"""Clean tests in a row: none may be called a leak, also beside another tenant that takes and gives memory all the time.

    python benchmarks/gpu/false_alarms.py --results false_alarms.json --beside

One process runs 200 tests without an engine and 40 with one (20 share an engine of module scope, 20 build their own).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import IN_PROCESS, Device, Results, tiny_llama
from runs import INNER, pytest_run

_OUTCOME = "gpu_memory_outcome"


@contextlib.contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Have another process at work on the device, which is no child of the tests' process."""
    if not wanted:
        yield
        return
    command = [sys.executable, str(INNER / "neighbour.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has a context now
            yield
            assert process.poll() is None, "the neighbour has died"
        finally:
            process.kill()


def counted(notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Count outcomes by kind of test, and give the texts of those that failed."""
    reports = [note for note in notes if note["event"] == "report"]
    verdicts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for report in reports:
        if report["when"] == "teardown":
            verdicts[report["test"].partition("[")[0]][report["properties"].get(_OUTCOME, "not checked")] += 1
    failed = [
        f"{report['test']} {report['when']}: {report['text']}" for report in reports if report["outcome"] == "failed"
    ]
    return {"verdicts": verdicts, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tensor-tests", type=int, default=200)
    parser.add_argument("--engine-tests", type=int, default=40)
    parser.add_argument("--beside", action="store_true", help="beside another tenant of the device")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for all tests together")
    arguments = parser.parse_args()
    device = Device()
    results = Results(arguments.results, device, beside=arguments.beside, summary={}, verdicts={}, failed=[])
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **IN_PROCESS,
            "BENCHMARK_MODEL": tiny_llama(),
            "BENCHMARK_ENGINE": json.dumps(device.engine()),
            "BENCHMARK_TENSOR_TESTS": str(arguments.tensor_tests),
            "BENCHMARK_ENGINE_TESTS": str(arguments.engine_tests),
        }
        with neighbour(arguments.beside), pytest_run(Path(folder) / "run", "clean.py", environ) as run:
            run.watch(lambda: None, arguments.limit)
            results.data.update(counted(run.notes()))
            ended = run.process.poll()
            output = run.output()
    verdicts = collections.Counter()
    for counts in results.data["verdicts"].values():
        verdicts.update(counts)
    tests = arguments.tensor_tests + arguments.engine_tests
    results.data["summary"] = {
        "tests": tests,
        "verdicts": verdicts,
        "exit_status": ended,
        "passed": ended == 0 and not verdicts["leaked"] and sum(verdicts.values()) == tests,
    }
    results.write()
    print(json.dumps(results.data["summary"]))
    if not results.data["summary"]["passed"]:
        print(output[-4000:])
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
