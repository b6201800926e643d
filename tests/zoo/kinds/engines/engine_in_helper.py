"""A helper class keeps the engine that it has made last."""

from __future__ import annotations

import pytest
from vllm import EngineArgs, LLMEngine
from zoo_engines import ENGINE, MODEL
from zoo_expect import Expect

EXPECT = Expect(
    holder="tests/zoo/kinds/engines/engine_in_helper.py: class attribute Engines.latest -> LLMEngine*",
    stayed=None,
    only="in process",
)
pytestmark = pytest.mark.gpu_released


class Engines:
    latest = None

    @classmethod
    def make(cls):
        cls.latest = LLMEngine.from_engine_args(EngineArgs(model=MODEL, **ENGINE))
        return cls.latest


def test_it_has_nothing_to_do():
    assert not Engines.make().has_unfinished_requests()


def let_go():
    Engines.latest = None
