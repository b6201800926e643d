"""Sleep mode. It exists on GPUs only."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu_released,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="sleep mode needs a GPU"),
]


def test_a_sleeping_engine_is_small(vllm_runner, model, small, gpu_memory):
    llm = vllm_runner(model, enable_sleep_mode=True, **{**small, "kv_cache_memory_bytes": 4 * 2**30})
    expected = llm.generate_greedy(["Hello"], max_tokens=4)
    awake = gpu_memory.device().used
    llm.llm.sleep(level=1)
    assert gpu_memory.device().used < awake - 3 * 2**30
    llm.llm.wake_up()
    assert llm.generate_greedy(["Hello"], max_tokens=4) == expected
