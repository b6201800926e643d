"""vllm_isolated: a test in a process of its own."""

import pytest


@pytest.mark.vllm_isolated(timeout="5 min")
@pytest.mark.gpu_released
def test_in_its_own_process(vllm_runner, model, small):
    assert vllm_runner(model, **small).generate_greedy(["Hello"], max_tokens=4)
