"""Tests that need several GPUs. They are skipped where there are fewer."""

import pytest


@pytest.mark.gpus(2)
@pytest.mark.gpu_released
def test_over_two_devices(vllm_runner, model, small, gpu_devices):
    llm = vllm_runner(model, tensor_parallel_size=len(gpu_devices), **small)
    assert llm.generate_greedy(["Hello"], max_tokens=4)
