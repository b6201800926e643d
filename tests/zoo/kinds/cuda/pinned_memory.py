"""A pinned buffer is kept; it is memory of the host, not of the device."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN, SIZE
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
BUFFERS = []


def test_logits_are_copied_to_the_host():
    BUFFERS.append(torch.empty((SIZE // 4096, 1024), pin_memory=True))
    BUFFERS[0].copy_(logits(), non_blocking=True)
    torch.cuda.synchronize()
    assert BUFFERS[0].all()


def let_go():
    BUFFERS.clear()
