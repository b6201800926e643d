"""A test is parametrised with tensors, which are there before it and after it."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


@pytest.mark.parametrize("table", [logits()], ids=["ones"])
def test_it_has_no_zeros(table):
    copy = table.clone()
    assert copy.all()


def let_go():
    del test_it_has_no_zeros.pytestmark[:]
