"""Constructors that fail half-way leave nothing behind."""

import pytest
from vllm import LLM

pytestmark = pytest.mark.gpu_released


def test_a_cache_that_is_too_small(vllm_runner, model, small):
    with pytest.raises(ValueError, match="memory"):
        vllm_runner(model, **{**small, "kv_cache_memory_bytes": 2**12})


def test_the_same_without_the_fixture(model, small):
    with pytest.raises(ValueError, match="memory"):
        LLM(str(model), **{**small, "kv_cache_memory_bytes": 2**12})
