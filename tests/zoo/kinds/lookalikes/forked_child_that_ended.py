"""A forked child has ended, though nobody has asked for its status yet."""

from __future__ import annotations

import os

import pytest
from zoo_expect import CLEAN, SIZE

EXPECT = CLEAN
pytestmark = [
    pytest.mark.gpu_released,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CHILDREN = []


def test_a_child_works():
    result, give = os.pipe()
    child = os.fork()
    if child == 0:
        kept = bytearray(b"x") * SIZE
        os.write(give, b"y" if kept else b"n")
        os._exit(0)
    os.close(give)
    CHILDREN.append(child)
    assert os.read(result, 1) == b"y"
    os.close(result)


def let_go():
    for child in CHILDREN:
        os.waitpid(child, 0)
