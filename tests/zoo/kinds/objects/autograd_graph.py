"""Losses are summed up with the graph that leads to them, which has saved what it needs for going back."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/autograd_graph.py: module global LOSSES[0] -> autograd graph of Tensor -> Tensor",
    stayed=None,
)
pytestmark = pytest.mark.gpu_released
LOSSES = []


def test_the_loss_is_finite():
    weight = torch.ones((), requires_grad=True, device=logits(1 << 20).device)
    LOSSES.append((logits() * weight).exp().sum())
    assert torch.isfinite(LOSSES[0])


def let_go():
    LOSSES.clear()
