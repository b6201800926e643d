"""An engine is put to sleep and kept: its memory pools are not of torch's allocator."""

from __future__ import annotations

import pytest
from vllm import LLM
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import Expect

# Only where it lives in this process; on the processor no engine sleeps.
EXPECT = Expect(
    holder="tests/zoo/kinds/engines/sleeping_engine.py: module global POOL[0] -> LLM*",
    reason="",
    stayed=None,
    only="cuda",
)
pytestmark = pytest.mark.gpu_released
POOL = []


def test_it_sleeps():
    llm = LLM(MODEL, **ENGINE, enable_sleep_mode=True)
    POOL.append(llm)
    assert generate(llm)
    llm.sleep(level=1)


def let_go():
    POOL.clear()
