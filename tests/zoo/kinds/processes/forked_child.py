"""A forked child that is never waited for takes memory of its own."""

from __future__ import annotations

import os

import pytest
from zoo_expect import SIZE, Expect

# A forked child cannot use CUDA. Of the pages that it shares with its parent, those to which one of them writes are
# copied, so that more stays than it has taken.
EXPECT = Expect(holder="process * (*), with *, started * ago, child of this process: *", stayed=None, only="cpu")
pytestmark = [
    pytest.mark.gpu_released,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CHILDREN = []


def test_a_child_works():
    ready, is_ready = os.pipe()
    stop, let_stop = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_stop)
        kept = bytearray(b"x") * SIZE
        os.write(is_ready, b"y")
        os.read(stop, 1)  # until the other end is closed
        os._exit(len(kept) == 0)
    os.close(is_ready)
    os.close(stop)
    CHILDREN.append((child, let_stop))
    assert os.read(ready, 1)
    os.close(ready)


def let_go():
    for child, let_stop in CHILDREN:
        os.close(let_stop)
        os.waitpid(child, 0)
