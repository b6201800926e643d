"""A kernel is compiled when it is first used, and stays loaded."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
TWICE = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")


def test_a_kernel_of_our_own():
    assert (TWICE(logits()) == 2).all()
