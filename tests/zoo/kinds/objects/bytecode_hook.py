"""A hook on compiled bytecode, as vLLM's wrapper of compiled models has one, is never removed."""

from __future__ import annotations

import pytest
from torch._dynamo.convert_frame import register_bytecode_hook
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="torch._dynamo.convert_frame: bytecode hook of Wrapper -> Wrapper.weights -> Tensor")
pytestmark = pytest.mark.gpu_released
HANDLES = []


class Wrapper:
    def __init__(self):
        self.weights = logits()
        HANDLES.append(register_bytecode_hook(self.bytecode_hook))

    def bytecode_hook(self, old, new):
        return None


def test_the_wrapper_is_built():
    assert Wrapper().weights.all()


def let_go():
    for handle in HANDLES:
        handle.remove()
