"""A fixture keeps its engines in a dictionary, and forgets to empty it when it is torn down."""

from __future__ import annotations

import pytest
from vllm import LLM
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import Expect

EXPECT = Expect(
    holder="tests/zoo/kinds/engines/llm_in_forgetful_fixture.py: module global _ENGINES['llm'] -> LLM*",
    reason="",
    stayed=None,
    owner="*fixture 'llm'*",
)
pytestmark = pytest.mark.gpu_released
_ENGINES = {}


@pytest.fixture(scope="module")
def llm(request):
    return _ENGINES.setdefault(request.fixturename, LLM(MODEL, **ENGINE))


def test_it_generates(llm):
    assert generate(llm)


def test_it_generates_again(llm):
    assert generate(llm)


def let_go():
    _ENGINES.clear()
