"""An object with slots has no dictionary to look into."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/slots_object.py: module global POOL[0] -> Block.next -> Block.data -> Tensor"
)
pytestmark = pytest.mark.gpu_released
POOL = []


class Block:
    __slots__ = ("data", "next")

    def __init__(self, data=None, next=None):
        self.data = data
        self.next = next


def test_blocks_are_linked():
    POOL.append(Block(next=Block(logits())))
    assert POOL[0].next.data.all()


def let_go():
    POOL.clear()
