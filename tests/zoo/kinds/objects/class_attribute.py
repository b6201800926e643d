"""A class keeps what was loaded last."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/objects/class_attribute.py: class attribute ModelCache.latest -> Tensor")
pytestmark = pytest.mark.gpu_released


class ModelCache:
    latest = None

    @classmethod
    def load(cls):
        cls.latest = logits()
        return cls.latest


def test_the_model_is_loaded():
    assert ModelCache.load().all()


def let_go():
    ModelCache.latest = None
