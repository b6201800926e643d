"""Another process takes memory of the device meanwhile, and this one leaks."""

from __future__ import annotations

import pytest
from zoo_expect import MIB, Expect
from zoo_neighbour import take
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/cuda/another_tenant_grows_beside_a_leak.py: module global OUTPUTS[0] -> Tensor")
pytestmark = pytest.mark.gpu_released
OUTPUTS = []


def test_something_else():
    take(512 * MIB)
    OUTPUTS.append(logits())


def let_go():
    OUTPUTS.clear()
    take(0)
