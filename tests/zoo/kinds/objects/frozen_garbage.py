"""A cycle that nobody uses any more was frozen: the collector does not look at it again."""

from __future__ import annotations

import gc

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*gc.freeze*")
pytestmark = pytest.mark.gpu_released


class Node:
    """Refers to itself."""


def test_a_server_is_warmed_up():
    node = Node()
    node.itself, node.weights = node, logits()
    gc.freeze()  # as servers do before they fork, or to collect faster
    assert node.weights.all()


def let_go():
    gc.unfreeze()
