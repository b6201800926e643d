"""A tensor is kept, and a forked child that runs on shares all the memory that there was before."""

from __future__ import annotations

import os

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

# The child has a tensor too: a copy of it, as soon as one of them writes.
EXPECT = Expect(
    holder="tests/zoo/kinds/processes/leak_beside_a_forked_child.py: module global OUTPUTS[0] -> Tensor", stayed=None
)
pytestmark = [
    pytest.mark.gpu_released,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CHILDREN = []
OUTPUTS = []


def test_a_child_waits():
    OUTPUTS.append(logits())
    stop, let_stop = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_stop)
        os.read(stop, 1)  # until the other end is closed
        os._exit(0)
    os.close(stop)
    CHILDREN.append((child, let_stop))
    assert OUTPUTS[0].all()


def let_go():
    OUTPUTS.clear()
    for child, let_stop in CHILDREN:
        os.close(let_stop)
        os.waitpid(child, 0)
