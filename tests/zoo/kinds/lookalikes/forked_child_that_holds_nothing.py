"""A forked child runs on; it has nothing of what the test takes afterwards."""

from __future__ import annotations

import os

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = [
    pytest.mark.gpu_released,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CHILDREN = []


def test_a_child_waits():
    stop, let_stop = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_stop)
        os.read(stop, 1)  # until the other end is closed
        os._exit(0)
    os.close(stop)
    CHILDREN.append((child, let_stop))
    assert logits().all()


def let_go():
    for child, let_stop in CHILDREN:
        os.close(let_stop)
        os.waitpid(child, 0)
