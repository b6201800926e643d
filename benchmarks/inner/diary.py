"""Plugin of the inner runs: writes down what happens, and builds the engines that the outer benchmark asks for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["BENCHMARK_FOLDER"])
PROMPT = "The engine gives its memory back"


def note(event, **facts):
    with (FOLDER / "diary").open("a", encoding="utf-8") as diary:
        diary.write(json.dumps({"event": event, "time": time.monotonic(), "pid": os.getpid(), **facts}) + "\n")


def causes(report):
    """What a failed test's processes printed of errors, and what the plugin said in any test."""
    lines = [line for name, text in report.sections if name.endswith(report.when) for line in text.splitlines()]
    ours = [line for line in lines if line.startswith("pytest-vllm-cleanup:")]
    return ours + [line[-300:] for line in lines if report.failed and "Error" in line][-8:]


def pytest_runtest_logreport(report):
    note(
        "report",
        test=report.nodeid.rpartition("::")[2],
        when=report.when,
        outcome=report.outcome,
        seconds=report.duration,
        properties=dict(report.user_properties),
        text=str(report.longrepr)[-1000:] if report.failed else "",
        causes=causes(report),
    )
    if report.when == "teardown":
        # Whoever watches looks what is left while this process still lives, and then says go.
        end = time.monotonic() + float(os.environ.get("BENCHMARK_HOLD", "0"))
        go = FOLDER / f"go_{report.nodeid.rpartition('::')[2]}"
        while time.monotonic() < end and not go.exists():
            time.sleep(0.02)


def build(make):
    """Build an engine with an ``LLM`` or a ``vllm_runner``, use it, and note when."""
    note("building")
    engine = make(os.environ["BENCHMARK_MODEL"], **json.loads(os.environ["BENCHMARK_ENGINE"]))
    generate(engine)
    note("generating")
    return engine


def generate(engine):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    assert getattr(engine, "llm", engine).generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids
