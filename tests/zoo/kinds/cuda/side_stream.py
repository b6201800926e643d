"""A tensor is used on a second stream, and freed while that still works on it."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_copies_overlap():
    table, stream = logits(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        copy = table * 2
    table.record_stream(stream)
    assert copy.shape == table.shape
