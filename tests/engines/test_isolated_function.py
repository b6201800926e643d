"""An engine in a function that runs in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest

from pytest_vllm_cleanup import run_isolated
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.processes.proc import ProcessId

pytestmark = pytest.mark.engine


def build_and_leave(model: str) -> tuple[int, list[tuple[int, int]], Any]:
    llm = tools.build(model)
    sys.left_here = llm  # type: ignore[attr-defined]
    handle = registry.of_engine(llm.llm_engine)
    assert handle is not None
    [output] = llm.generate(tools.PROMPT, use_tqdm=False)
    return len(tools.tokens(llm)), [(process.pid, process.started) for process in handle.processes], output


def test_an_engine_that_the_function_leaves_is_gone_with_its_processes_and_its_memory(
    model: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run_isolated(abs, -1)
    before = current_gauge().read()["host"].children
    count, processes, output = run_isolated(
        build_and_leave, str(model), timeout="4 min", env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    )
    assert count == 8
    assert output.prompt == tools.PROMPT
    assert processes
    assert not [process for process in processes if proc.is_running(ProcessId(*process))]
    assert current_gauge().read()["host"].children == before
    assert not [str(warning.message) for warning in recwarn if "clos" in str(warning.message)]
