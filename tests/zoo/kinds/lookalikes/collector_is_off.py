"""A test switches the collector off to be fast, and leaves a cycle behind."""

from __future__ import annotations

import gc

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


class Node:
    """Refers to itself."""


def test_steps_are_fast():
    gc.disable()
    node = Node()
    node.itself, node.weights = node, logits()
    assert node.weights.all()


def let_go():
    gc.enable()
