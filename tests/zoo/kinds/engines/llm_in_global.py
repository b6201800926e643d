"""An engine is built once and kept in a cache of the module."""

from __future__ import annotations

import pytest
from vllm import LLM
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import Expect

EXPECT = Expect(
    holder="tests/zoo/kinds/engines/llm_in_global.py: module global CACHE['tiny'] -> LLM*", reason="", stayed=None
)
pytestmark = pytest.mark.gpu_released
CACHE = {}


def load(name):
    if name not in CACHE:
        CACHE[name] = LLM(MODEL, **ENGINE)
    return CACHE[name]


def test_it_generates():
    assert generate(load("tiny"))
    assert generate(load("tiny"))


def let_go():
    CACHE.clear()
