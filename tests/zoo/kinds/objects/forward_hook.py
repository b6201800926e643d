"""A hook that is never removed collects activations of a model of the module."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import DEVICE, SIZE, Expect

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/forward_hook.py: module global MODEL -> "
    "Identity._forward_hooks[*] -> "
    "closure variable activations[0] of test_activations_are_seen.<locals>.<lambda> -> Tensor"
)
pytestmark = pytest.mark.gpu_released
MODEL = torch.nn.Identity()


def test_activations_are_seen():
    activations = []
    MODEL.register_forward_hook(lambda module, inputs, output: activations.append(output.clone()))
    MODEL(torch.ones(SIZE // 4096, 1024, device=DEVICE))
    assert activations[0].all()


def let_go():
    MODEL._forward_hooks.clear()
