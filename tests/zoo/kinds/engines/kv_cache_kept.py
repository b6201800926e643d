"""The engine is closed in time, but its KV cache was kept for a look."""

from __future__ import annotations

import pytest
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import Expect

EXPECT = Expect(
    holder="tests/zoo/kinds/engines/kv_cache_kept.py: module global SEEN['kv cache'][*] -> Tensor",
    stayed=None,
    only="in process",
)
pytestmark = pytest.mark.gpu_released
SEEN = {}


def test_the_cache_is_filled(vllm_runner):
    runner = vllm_runner(MODEL, **ENGINE)
    assert generate(runner.llm)
    core = runner.llm.llm_engine.engine_core.engine_core
    SEEN["kv cache"] = list(core.model_executor.driver_worker.worker.model_runner.kv_caches)


def let_go():
    SEEN.clear()
