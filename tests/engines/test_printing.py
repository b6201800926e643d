"""An ``LLM`` is printed in bounded time, as pytest does it with a failed test's arguments."""

from __future__ import annotations

import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_lab
import engine_tools as tools
import psutil
import pytest
from engine_lab import IN_CHILD_PROCESSES, Lab, run_pytest

from pytest_vllm_cleanup import close_engine
from pytest_vllm_cleanup.engines.registry import registry

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def children_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with engine_lab.lab(tmp_path_factory.mktemp("lab"), IN_CHILD_PROCESSES) as made:
        yield made


def _processes_of(llm: Any) -> list[psutil.Process]:
    handle = registry.of_engine(llm.llm_engine)
    assert handle is not None
    assert handle.processes
    return [psutil.Process(child.pid) for child in handle.processes]


def _timed(llm: Any) -> tuple[float, str]:
    begun = time.monotonic()
    text = repr(llm)
    return time.monotonic() - begun, text.replace(hex(id(llm)), "0x")


def stuck(model: str) -> dict[str, Any]:
    llm = tools.build(model)
    before = _timed(llm)[1]
    llm._cached_repr = None  # as if it had never been printed
    processes = _processes_of(llm)
    for process in processes:
        process.suspend()
    first, again = _timed(llm), _timed(llm)
    for process in processes:
        process.resume()
    count = len(tools.tokens(llm))  # answered after the question that was given up
    after = _timed(llm)[1]
    llm._cached_repr = None
    close_engine(llm)
    return {"before": before, "first": first, "again": again, "count": count, "after": after, "closed": repr(llm)}


def test_an_engine_that_does_not_answer_is_given_up_and_lives_on(children_lab: Lab, model: Path) -> None:
    seen = children_lab(stuck, model)
    assert seen["before"].startswith("LlamaForCausalLM(")
    late = "<vllm.entrypoints.llm.LLM object at 0x: its engine did not answer within 5 s>"
    assert seen["first"][1] == seen["again"][1] == late
    assert 5 <= seen["first"][0] < 7
    assert seen["again"][0] < 0.1, "asked again before it had answered"
    assert (seen["count"], seen["after"]) == (8, seen["before"])
    assert seen["closed"].endswith(": its engine is closed>")


def ended(model: str) -> tuple[float, str]:
    llm = tools.build(model)
    for process in _processes_of(llm):
        process.kill()
        process.wait(10)
    seen = _timed(llm)
    close_engine(llm)
    return seen


def test_an_engine_that_has_ended_is_not_asked(children_lab: Lab, model: Path) -> None:
    seconds, text = children_lab(ended, model)
    assert text == "<vllm.entrypoints.llm.LLM object at 0x: its engine has ended>"
    assert seconds < 0.5


def in_process(model: str) -> dict[str, Any]:
    llm = tools.build(model)
    live = repr(llm)
    cached = llm._cached_repr
    close_engine(llm)
    still = repr(llm)
    llm._cached_repr = None
    return {"live": live, "cached": cached, "still": still, "closed": repr(llm)}


def test_an_engine_of_this_process_is_printed_as_ever(lab: Lab, model: Path) -> None:
    seen = lab(in_process, model)
    assert seen["live"].startswith("LlamaForCausalLM(")
    assert seen["live"] == seen["cached"] == seen["still"]
    assert re.fullmatch(r"<vllm\.entrypoints\.llm\.LLM object at 0x\w+: its engine is closed>", seen["closed"])


STUCK = """
    import psutil
    import pytest

    @pytest.fixture
    def llm(vllm_runner):
        return vllm_runner({model!r}, dtype="float32", enforce_eager=True, max_model_len=256,
                           kv_cache_memory_bytes=64 << 20).llm

    @pytest.mark.gpu_released
    def test_stuck(llm):
        from pytest_vllm_cleanup.engines.registry import registry
        processes = [psutil.Process(child.pid) for child in registry.of_engine(llm.llm_engine).processes]
        for process in processes:
            process.send_signal({signal})
        if {signal} == 9:
            psutil.wait_procs(processes, timeout=10)
        helper(llm)

    def helper(engine):
        assert engine is None

    @pytest.mark.gpu_released
    def test_after():
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_failing_test_with_a_dead_or_hanging_engine_is_reported(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    source = textwrap.dedent(STUCK).format(model=str(model), signal=int(number))
    run = run_pytest(tmp_path, source, {**IN_CHILD_PROCESSES, "PYTEST_ADDOPTS": "--showlocals"}, timeout=150)
    assert run.outcomes == {"test_stuck": ["FAILED"], "test_after": ["PASSED"]}, run.output
    printed = set(re.findall(r"^(?:llm|engine) += (<vllm.+)$", run.section("test_stuck"), re.M))
    what = "did not answer within 5 s" if number is signal.SIGSTOP else "has ended"
    assert len(printed) == 1, run.section("test_stuck")
    assert printed.pop().endswith(f": its engine {what}>")
