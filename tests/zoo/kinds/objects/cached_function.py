"""Weights are loaded once and cached for ever."""

from __future__ import annotations

import functools

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/cached_function.py: functools.lru_cache of load_weights (result) -> Tensor"
)
pytestmark = pytest.mark.gpu_released


@functools.cache
def load_weights(name):
    return logits()


def test_weights_are_loaded():
    assert load_weights("tiny").all()


def let_go():
    load_weights.cache_clear()
