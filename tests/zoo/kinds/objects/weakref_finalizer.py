"""A finalizer waits for a server that lives on, with the tensor as its argument."""

from __future__ import annotations

import weakref

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="weakref.finalize of Server*-> Tensor")
pytestmark = pytest.mark.gpu_released


class Server:
    """Lives as long as its module."""


SERVER = Server()


def free(tensor):
    tensor.zero_()


def test_a_finalizer_is_planned():
    assert weakref.finalize(SERVER, free, logits()).alive


def let_go():
    global SERVER
    SERVER = None
