"""A method is cached, and with its results the cache keeps the instance."""

from __future__ import annotations

import functools

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/lru_cached_method.py: "
    "functools.lru_cache of Model.encode (argument 'self') -> Model.weights -> Tensor"
)
pytestmark = pytest.mark.gpu_released


class Model:
    def __init__(self):
        self.weights = logits()

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def encode(self, text):
        return len(text) * int(self.weights[0, 0])


def test_encoding_is_deterministic():
    model = Model()
    assert model.encode("captain") == model.encode("captain")


def let_go():
    Model.encode.cache_clear()
