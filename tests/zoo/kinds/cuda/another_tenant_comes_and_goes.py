"""Another process, which is not ours, takes memory of the device and gives it back."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN, MIB
from zoo_neighbour import take
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_something_else():
    take(512 * MIB)
    assert logits().all()
    take(0)
