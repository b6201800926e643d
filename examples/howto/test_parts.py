"""Checks of a part of a test, and readings."""

import pytest
from vllm import LLM

from pytest_vllm_cleanup import GpuMemoryLeakError, assert_gpu_released, close_engine, vllm_engine


def test_a_block(model, small):
    with assert_gpu_released(timeout="30 s"), vllm_engine(str(model), **small) as llm:
        assert llm.generate(["Hello"], use_tqdm=False)


def test_a_leak_in_a_block(model, small):
    with pytest.raises(GpuMemoryLeakError, match="left"), assert_gpu_released():
        llm = LLM(str(model), **small)
    close_engine(llm)


def test_as_a_fixture(assert_gpu_released, vllm_runner, model, small):
    for prompt in ("Hello", "Bye"):
        with assert_gpu_released(), vllm_runner(model, **small) as llm:
            llm.generate_greedy([prompt], max_tokens=4)


def test_peak(gpu_memory, vllm_runner, model, small):
    before = gpu_memory.device().used
    vllm_runner(model, **small).generate_greedy(["Hello"], max_tokens=4)
    assert gpu_memory.peak("used") - before < 2 * 2**30
