"""Engines in child processes, vLLM's default mode: their processes are gone when they are closed."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_lab
import engine_tools as tools
import psutil
import pytest
from engine_lab import Lab, run_pytest

from pytest_vllm_cleanup import close_engine
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

pytestmark = pytest.mark.engine

CHILDREN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
kept: dict[str, Any] = {}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An interpreter whose engines are in child processes."""
    with engine_lab.lab(tmp_path_factory.mktemp("lab"), CHILDREN) as made:
        yield made


class Owner:
    """Stands for a test class or fixture object with an engine."""


def _processes() -> list[psutil.Process]:
    """Return all our processes but Python's own helper, which stays."""
    family = psutil.Process().children(recursive=True)
    return [child for child in family if not _is_helper(child) and child.pid != current_watchdog().pid]


def _is_helper(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return False  # one that nobody has fetched counts as left


def closing(model: str, held: bool) -> dict[str, Any]:
    llm = tools.build(model)
    handle = registry.of_engine(llm.llm_engine)
    assert handle is not None
    count, running = len(tools.tokens(llm)), _processes()
    recorded = {child.pid for child in handle.processes}
    if held:
        owner = Owner()
        owner.llm, owner.me = llm, owner  # type: ignore[attr-defined]
        kept["engine"], kept["generate"] = llm, llm.generate
    report = close_engine(llm)
    survivors = [process.pid for process in running if process.is_running()]
    again = close_engine(llm) is report
    try:
        llm.generate("once more")
        use = ""
    except Exception as problem:
        use = type(problem).__name__
    kept.clear()
    return {
        "in process": handle.in_process,
        "tokens": count,
        "all recorded": {process.pid for process in running} <= recorded,
        "started": len(running),
        "survivors": survivors,
        "left": len(_processes()),
        "errors": report.errors,
        "steps": [name for name, _, _ in report.steps],
        "again": again,
        "use": use,
        "cuda": _cuda_is_up(),
    }


def _cuda_is_up() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


@pytest.mark.parametrize("held", [False, True], ids=["clean", "held by a cycle, a global and a bound method"])
def test_closing_ends_all_processes_of_the_engine(lab: Lab, model: Path, held: bool) -> None:
    seen = lab(closing, model, held)
    assert seen.pop("started") >= 1
    assert seen == {
        "in process": False,
        "tokens": 8,
        "all recorded": True,
        "survivors": [],
        "left": 0,
        "errors": [],
        "steps": ["shut it down", "wait for its processes", "wait for the driver"],
        "again": True,
        "use": "EngineClosedError",
        "cuda": False,
    }


def asynchronous(model: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from pytest_vllm_cleanup.engines import instrument

    instrument.install()

    async def main() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                dtype="float32",
                max_model_len=256,
                enforce_eager=True,
                kv_cache_memory_bytes=64 * tools.MIB,
            )
        )
        greedy = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = [output async for output in engine.generate("Hello", greedy, request_id="one")]
        running = _processes()
        report = close_engine(engine)
        return {
            "tokens": len(outputs[-1].outputs[0].token_ids),
            "started": len(running),
            "survivors": [process.pid for process in running if process.is_running()],
            "errors": report.errors,
        }

    return asyncio.run(main())


def test_an_asynchronous_engine_is_closed_inside_its_event_loop(lab: Lab, model: Path) -> None:
    seen = lab(asynchronous, model)
    assert seen.pop("started") >= 1
    assert seen == {"tokens": 8, "survivors": [], "errors": []}


INNER = """
import psutil
import pytest

kept = []

HELPERS = ("resource_tracker", "pytest_vllm_cleanup")

def processes():
    family = psutil.Process().children(recursive=True)
    return [p for p in family if not any(helper in " ".join(p.cmdline()) for helper in HELPERS)]

@pytest.mark.gpu_released
def test_engine_is_kept(vllm_runner):
    runner = vllm_runner(
        {model!r}, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20
    )
    assert len(runner.generate_greedy(["Hello"], 4)) == 1
    kept.append(runner.llm)
    assert processes()

def test_its_processes_are_gone():
    assert not processes()
"""


def test_a_fixture_ends_the_processes_of_its_engine(model: Path, tmp_path: Path) -> None:
    run = run_pytest(tmp_path, textwrap.dedent(INNER).format(model=str(model)), CHILDREN)
    assert run.outcomes == {"test_engine_is_kept": ["PASSED"], "test_its_processes_are_gone": ["PASSED"]}, run.output
    assert run.status == 0
