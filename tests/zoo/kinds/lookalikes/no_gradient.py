"""A loss is kept as a number of its own, without the graph."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
LOSSES = []


def test_the_loss_is_finite():
    weight = torch.ones((), requires_grad=True, device=logits(1 << 20).device)
    LOSSES.append((logits() * weight).exp().sum().item())
    assert LOSSES[0] > 0
