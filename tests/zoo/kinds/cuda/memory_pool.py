"""A tensor is made in a memory pool of the user's own, and both are kept."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/cuda/memory_pool.py: module global POOLS['table'][1] -> Tensor")
pytestmark = pytest.mark.gpu_released
POOLS = {}


def test_a_table_has_its_own_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        table = logits()
    POOLS["table"] = (pool, table)
    assert table.all()


def let_go():
    POOLS.clear()
