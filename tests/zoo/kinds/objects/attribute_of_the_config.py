"""A tensor is put on pytest's configuration, to be shared by all tests."""

from __future__ import annotations

import weakref

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*Config.shared_weights -> Tensor")
pytestmark = pytest.mark.gpu_released
CONFIGS = weakref.WeakSet()


def test_weights_are_shared(request):
    CONFIGS.add(request.config)
    request.config.shared_weights = logits()
    assert request.config.shared_weights.all()


def let_go():
    for config in CONFIGS:
        del config.shared_weights
