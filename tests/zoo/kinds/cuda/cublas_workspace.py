"""The first product on a stream makes a workspace, which cuBLAS keeps."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN, DEVICE

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_products_on_streams():
    ones = torch.ones(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (ones @ ones == 1024).all()
