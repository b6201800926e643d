"""A fixture of the module has an engine that its tests use, and closes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm import LLM
from zoo_engines import ENGINE, MODEL, generate
from zoo_expect import CLEAN
from zoo_tensors import logits

from pytest_vllm_cleanup import close_engine

EXPECT = replace(CLEAN, only="in process")
pytestmark = pytest.mark.gpu_released


@pytest.fixture(scope="module")
def llm():
    llm = LLM(MODEL, **ENGINE)
    yield llm
    close_engine(llm)


def test_it_generates(llm):
    assert generate(llm)


def test_in_between():
    assert logits().all()


def test_it_generates_again(llm):
    assert generate(llm)
