"""Engines and checks without pytest's fixtures, and the peak of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
from engine_lab import Lab

from pytest_vllm_cleanup import GpuMemory, GpuMemoryLeakError, assert_gpu_released, close_engine, vllm_engine

pytestmark = pytest.mark.engine

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 256 * tools.MIB}


def released(model: str) -> int:
    tools.warm_up(model)
    with assert_gpu_released(strict=True), vllm_engine(model, **ENGINE) as llm:
        return len(tools.tokens(llm))


def test_a_block_that_gives_its_memory_back_passes(lab: Lab, model: Path) -> None:
    assert lab(released, model) == 8


def leaking(model: str, what: str) -> str:
    import torch

    tools.warm_up(model)
    kept: list[Any] = []
    text = ""
    try:
        with assert_gpu_released():
            if what == "engine":
                kept.append(tools.build(model, **ENGINE))
            else:
                kept.append(torch.ones(300 * tools.MIB, dtype=torch.uint8))
    except GpuMemoryLeakError as problem:
        text = str(problem)
    if what == "engine":
        close_engine(kept[0])
    return text


@pytest.mark.parametrize("what", ["engine", "tensor"])
def test_a_block_that_keeps_memory_raises_with_the_numbers(lab: Lab, model: Path, what: str) -> None:
    text = lab(leaking, model, what)
    sentence, _, evidence = text.partition("\n")
    assert sentence.startswith("the block left ")
    assert "used" in evidence
    if what == "tensor":
        size = float(sentence.removeprefix("the block left ").split(" MiB (")[0])
        assert 256 < size < 350
        assert "on host by private host memory" in sentence
    else:
        assert "an engine alive." in sentence
        assert "still alive: LLMEngine number " in evidence


def tolerated() -> bool:
    import torch

    with assert_gpu_released(tolerance="400 MiB"):
        kept = torch.ones(300 * tools.MIB, dtype=torch.uint8)
    return bool(kept.all())


def test_a_tolerance_lets_memory_pass(lab: Lab) -> None:
    assert lab(tolerated)


def left_by(model: str, how: str) -> dict[str, Any]:
    tools.warm_up(model)
    before, alive, error = tools.private_mib(), None, ""
    try:
        with vllm_engine(model=model, **ENGINE) as llm:
            alive = tools.watch(llm)
            assert len(tools.tokens(llm)) == 8
            taken = tools.private_mib() - before
            if how == "exception":
                raise LookupError("inside")
            if how == "interrupt":
                raise KeyboardInterrupt("inside")
    except (LookupError, KeyboardInterrupt) as problem:
        error = str(problem)
    assert alive is not None
    return {"alive": alive(), "error": error, "taken": taken, "stayed": tools.private_mib() - before}


@pytest.mark.parametrize(("how", "error"), [("end", ""), ("exception", "inside"), ("interrupt", "inside")])
def test_leaving_vllm_engine_frees_it(lab: Lab, model: Path, how: str, error: str) -> None:
    seen = lab(left_by, model, how)
    assert seen["alive"] == []
    assert seen["error"] == error
    assert seen["taken"] > 256
    assert seen["stayed"] < 40


def peak(model: str) -> dict[str, Any]:
    tools.warm_up(model)
    with GpuMemory() as memory:
        before = memory.device("host").used or 0
        with vllm_engine(model, **ENGINE) as llm:
            tools.tokens(llm)
            live = memory.device().used or 0
        after = memory.device().used or 0
        return {"before": before, "live": live, "after": after, "peak": memory.peak()}


def test_the_peak_sees_an_engine_that_is_gone(lab: Lab, model: Path) -> None:
    seen = {name: value / tools.MIB for name, value in lab(peak, model).items()}
    assert seen["peak"] >= seen["live"] > seen["before"] + 256
    assert seen["after"] < seen["before"] + 40


def unknown_device() -> list[str]:
    texts = []
    for request in (lambda memory: memory.device("cuda:7"), lambda memory: memory.peak("everything")):
        with GpuMemory() as memory:
            try:
                request(memory)
            except (LookupError, ValueError) as problem:
                texts.append(str(problem))
    return texts


def test_what_cannot_be_measured_is_refused_with_what_can(lab: Lab) -> None:
    device, figure = lab(unknown_device)
    assert "cuda:7" in device
    assert "these can: host" in device
    assert figure == "figure 'everything': expected one of used, own, children, allocated, reserved"
