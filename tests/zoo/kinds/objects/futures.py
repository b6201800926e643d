"""Futures of a thread pool are kept after their results were read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/objects/futures.py: module global FUTURES[0] -> Future._result -> Tensor")
pytestmark = pytest.mark.gpu_released
FUTURES = []


def test_batches_are_made_beside():
    with ThreadPoolExecutor(2) as pool:
        FUTURES.append(pool.submit(logits))
    assert FUTURES[0].result().all()


def let_go():
    FUTURES.clear()
