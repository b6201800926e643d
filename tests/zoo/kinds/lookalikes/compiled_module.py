"""A module of the user is compiled and dropped; what the compiler remembers of it is not its weights."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from zoo_expect import CLEAN, DEVICE, SIZE

EXPECT = CLEAN
released = pytest.mark.gpu_released


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(SIZE // 4096, 1024, device=DEVICE))

    def forward(self, inputs):
        return inputs * self.weights[0]


def test_compiling_works():
    """What the compiler imports when it first works looks like a leak in host memory."""
    assert torch.compile(torch.abs, backend="eager")(torch.ones(1))


@released
def test_compiled_and_not_are_the_same():
    module, inputs = Scale(), torch.ones(1024, device=DEVICE)
    assert torch.equal(torch.compile(module, backend="eager")(inputs), module(inputs))
