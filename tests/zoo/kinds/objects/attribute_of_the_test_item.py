"""A tensor is put on pytest's own item for a hook to find, and nobody takes it from there."""

from __future__ import annotations

import weakref

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*Function.outputs -> Tensor")
pytestmark = pytest.mark.gpu_released
ITEMS = weakref.WeakSet()


def test_outputs_are_left_for_the_report(request):
    ITEMS.add(request.node)
    request.node.outputs = logits()
    assert request.node.outputs.all()


def let_go():
    for item in ITEMS:
        del item.outputs
