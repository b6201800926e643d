"""A memory pool is kept when all its tensors are gone; what it has reserved stays with it."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import MIB, Expect
from zoo_tensors import logits

EXPECT = Expect(
    reason="allocator cache",
    holder="tests/zoo/kinds/cuda/memory_pool_alone.py: module global POOLS[0] -> MemPool",
    stayed=None,
)
pytestmark = pytest.mark.gpu_released
POOLS = []


def test_a_table_has_its_own_pool():
    POOLS.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(POOLS[0]):
        assert logits(1024 * MIB).all()


def let_go():
    POOLS.clear()
