"""Another process, which is not ours, takes memory of the device meanwhile."""

from __future__ import annotations

import pytest
from zoo_expect import MIB, Expect
from zoo_neighbour import take
from zoo_tensors import logits

EXPECT = Expect(outcome="foreign", reason="", stayed=None)
pytestmark = pytest.mark.gpu_released


def test_something_else():
    take(512 * MIB)
    assert logits().all()


def let_go():
    take(0)
