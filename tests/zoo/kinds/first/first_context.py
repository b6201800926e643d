"""The first test that uses the device pays for its context and for cuBLAS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zoo_expect import CLEAN, DEVICE

EXPECT = replace(CLEAN, only="cuda")
pytestmark = pytest.mark.gpu_released


def test_a_product_of_matrices():
    ones = torch.ones(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    assert (ones @ ones == 1024).all()
