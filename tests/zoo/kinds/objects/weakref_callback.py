"""A model is watched by a weak reference, but its callback holds strongly what belongs to the model."""

from __future__ import annotations

import weakref

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/weakref_callback.py: module global WATCHED[0] -> "
    "callback of a weakref -> "
    "closure variable cache['prompt'] of test_the_model_is_watched.<locals>.<lambda> -> Tensor"
)
pytestmark = pytest.mark.gpu_released
WATCHED = []


class Model:
    """Has its cache elsewhere."""


MODEL = Model()


def test_the_model_is_watched():
    cache = {"prompt": logits()}
    WATCHED.append(weakref.ref(MODEL, lambda _: cache.clear()))
    assert WATCHED[0]() is MODEL


def let_go():
    WATCHED.clear()
