"""A test fails with an engine in a local."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm import LLM
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import CLEAN

EXPECT = replace(CLEAN, test="failed")
pytestmark = pytest.mark.gpu_released


def test_the_text_is_known():
    llm = LLM(MODEL, **ENGINE)
    assert generate(llm) == "into the sea"
