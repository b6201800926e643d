"""An engine that has slept is closed by its fixture, still asleep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import CLEAN

EXPECT = replace(CLEAN, only="cuda")
pytestmark = pytest.mark.gpu_released


def test_it_sleeps(vllm_runner):
    runner = vllm_runner(MODEL, **ENGINE, enable_sleep_mode=True)
    assert generate(runner.llm)
    runner.llm.sleep(level=1)
