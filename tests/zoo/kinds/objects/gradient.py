"""A model of the module keeps the gradients of the last step."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import SIZE, Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/objects/gradient.py: module global MODEL*weight*grad -> Tensor")
pytestmark = pytest.mark.gpu_released
MODEL = torch.nn.Linear(1024, SIZE // 4096, bias=False, device=logits(1 << 20).device)


def test_gradients_are_finite():
    MODEL(torch.ones(2, 1024, device=MODEL.weight.device)).sum().backward()
    assert torch.isfinite(MODEL.weight.grad).all()


def let_go():
    global MODEL
    MODEL = None  # also its weights, which no other kind needs
