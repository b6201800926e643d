"""What the plugin costs a suite that does not use it: 2,000 trivial tests, with and without it, in turns.

Usage: python benchmarks/unmarked_suite.py --out unmarked_suite.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from common import processor

TESTS_PER_MODULE = 100
WITHOUT = ["-p", "no:vllm_cleanup"]


def write_suite(folder: Path, tests: int) -> None:
    """Write modules of trivial tests, a third of which take a fixture."""
    for start in range(0, tests, TESTS_PER_MODULE):
        count = min(TESTS_PER_MODULE, tests - start)
        lines = ["import pytest", "@pytest.fixture", "def number():", "    return 1"]
        for test in range(count):
            lines += [f"def test_{test}({'number' if test % 3 == 0 else ''}):", "    assert True"]
        (folder / f"test_module_{start}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(folder: Path, plugin: bool, tests: int) -> tuple[float, float]:
    """Run the suite in a fresh process.

    Returns:
        seconds on the wall clock, and seconds of processor time, which other work on the machine disturbs less; the
        start of Python included.
    """
    # Plugins are found as in any run: looking for them is pytest's own cost, with and without this one.
    environment = dict(os.environ)
    # Installed packages are compiled; so must everything be here, whatever the environment says.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *([] if plugin else WITHOUT)]
    start, used = time.perf_counter(), processor_time()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    wall, cpu = time.perf_counter() - start, processor_time() - used
    if f"{tests} passed" not in done.stdout:
        raise RuntimeError(f"not all tests passed:\n{done.stdout}")
    return wall, cpu


def processor_time() -> float:
    """Return the processor time that ended child processes have used, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(folder: Path, pairs: int, tests: int) -> list[dict[str, float]]:
    """Time pairs of runs; which one of a pair goes first changes from pair to pair."""
    for plugin in (False, True):
        run(folder, plugin, tests)  # fills the caches of files and of compiled code
    found = []
    for number in range(pairs):
        order = (False, True) if number % 2 == 0 else (True, False)
        seconds = {plugin: run(folder, plugin, tests) for plugin in order}
        pair = {}
        for at, clock in enumerate(("wall", "cpu")):
            without, with_it = seconds[False][at], seconds[True][at]
            pair |= {f"{clock}_without": without, f"{clock}_with": with_it, f"{clock}_ratio": with_it / without}
        found.append(pair)
        print(f"pair {number + 1}: {pair['wall_without']:.3f} s without, {pair['wall_with']:.3f} s with the plugin")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--pairs", type=int, default=11, help="how many pairs of runs (default: 11)")
    parser.add_argument("--tests", type=int, default=2000, help="how many tests (default: 2000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_suite(folder, arguments.tests)
        pairs = measure(folder, arguments.pairs, arguments.tests)
    result = {
        "median_ratio": statistics.median(pair["wall_ratio"] for pair in pairs),
        "median_ratio_of_processor_time": statistics.median(pair["cpu_ratio"] for pair in pairs),
        "median_seconds_without": statistics.median(pair["wall_without"] for pair in pairs),
        "median_seconds_with": statistics.median(pair["wall_with"] for pair in pairs),
        "tests": arguments.tests,
        "pairs": pairs,
        "command": "python benchmarks/unmarked_suite.py " + " ".join(sys.argv[1:]),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("pytest", "pluggy", "pytest-vllm-cleanup")},
        },
        "machine": {"system": platform.platform(), "processor": processor(), "processors": os.cpu_count()},
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"median ratio: {result['median_ratio']:.4f}")
    print(f"median ratio of processor time: {result['median_ratio_of_processor_time']:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
