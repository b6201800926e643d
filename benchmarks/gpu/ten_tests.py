"""Ten tests in one process, the first of which fails with an engine in a local variable: with the plugin and without.

    python benchmarks/gpu/ten_tests.py --results ten_tests.json

Each test has an engine of its own in the process of pytest, which takes 60 % of the device: a second one fits only if
the first has given its memory back. With the plugin nine pass, and the section FAILURES says of the first what pytest
says without the plugin (but for the addresses of objects). Without it, the figures say how many of the nine pass.

Without a GPU the engines are small and in host memory, and nothing is asked of the run without the plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import IN_PROCESS, QUIET, Device, Results, tiny_llama
from runs import HERE, INNER

SHARE = 0.6  # of the device, for one engine
LIMIT = 500.0  # seconds for ten tests
# vLLM writes how long loading took, and progress bars: no two runs write the same there.
STYLES = {"": [], "--showlocals": ["--showlocals"], "--tb=short": ["--tb=short"]}


def run(folder: Path, environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run the suite; return the outcome of each test, and what is printed and written about failures."""
    folder.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    shutil.copy(INNER / "ten_tests.py", folder / "test_ten.py")
    installed = any(point.name == "vllm_cleanup" for point in metadata.entry_points(group="pytest11"))
    plugin = "vllm_cleanup" if installed else "pytest_vllm_cleanup.plugin"
    command = [sys.executable, "-m", "pytest", "-rN", "--color=no", "-p", "no:cacheprovider", "--show-capture=no"]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "--junitxml=junit.xml", "-p", plugin, *arguments]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(HERE.parent)]))
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET, **IN_PROCESS, **environ, "PYTHONPATH": paths, "COLUMNS": "120"},
            cwd=folder,
        )
        try:
            status: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
            process.kill()
            process.wait()
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    cases: dict[str, list[str]] = {}
    junit = []
    if (folder / "junit.xml").exists():
        for case in ElementTree.parse(folder / "junit.xml").getroot().iter("testcase"):
            problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
            cases.setdefault(str(case.get("name")), []).extend([child.tag for child in problems] or ["passed"])
            junit += [
                [case.get("name"), child.tag, _plain(f"{child.get('message')}\n{child.text}")] for child in problems
            ]
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "cases": cases,
        "failures": _plain("".join(re.findall(r"^=+ FAILURES =+$.*?(?=^=|^- generated xml)", text, re.M | re.S))),
        "junit": junit,
        "output": text,
    }


def _plain(text: str) -> str:
    return re.sub("0x[0-9a-f]{6,}", "0x", text)


def counts(found: dict[str, Any]) -> dict[str, Any]:
    passing = [name for name, outcome in found["cases"].items() if outcome == ["passed"]]
    return {
        "exit_status": found["status"],
        "seconds": found["seconds"],
        "tests": len(found["cases"]),
        "passed": len(passing),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--styles", nargs="*", default=list(STYLES), help="ways to print failures that are compared")
    options = parser.parse_args()
    device = Device()
    engine = device.engine()
    if device.names:
        del engine["kv_cache_memory_bytes"]
        engine["gpu_memory_utilization"] = SHARE
    environ = {"BENCHMARK_MODEL": tiny_llama(), "BENCHMARK_ENGINE": json.dumps(engine)}
    results = Results(options.results, device, engine=engine, summary={}, runs={}, texts_equal={})
    without = ("-p", "no:vllm_cleanup", "-p", "no:pytest_vllm_cleanup.plugin")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = run(folder / "with", environ)
        results.data["runs"]["with the plugin"] = counts(ours)
        results.write()
        plain = run(folder / "without", environ, *without)
        results.data["runs"]["without the plugin"] = counts(plain)
        results.write()
        for style in options.styles:
            select = ["-k", "test_fails", *STYLES[style]]
            first = run(folder / f"styled{style}" / "with", environ, *select)
            other = run(folder / f"styled{style}" / "without", environ, *select, *without)
            equal = (
                bool(first["failures"]) and first["failures"] == other["failures"] and first["junit"] == other["junit"]
            )
            results.data["texts_equal"][style or "default"] = equal
            results.write()
    alone = results.data["runs"]["without the plugin"]
    right = ours["cases"].get("test_fails") == ["failure"] and counts(ours)["passed"] == 9
    texts = results.data["texts_equal"]
    results.data["summary"] = {
        "nine_pass_with_the_plugin": right,
        "passed_without_the_plugin": alone["passed"],
        "texts_equal": all(texts.values()) if texts else "not compared",
        "passed": right and all(texts.values()) and (not device.names or alone["passed"] < 9),
    }
    results.write()
    print(json.dumps(results.data["summary"]))
    if not results.data["summary"]["passed"]:
        print(ours["output"][-6000:], file=sys.stderr)
    return 0 if results.data["summary"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
