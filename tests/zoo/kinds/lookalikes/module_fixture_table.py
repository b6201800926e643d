"""A fixture of the module has a table that all its tests use, and that goes with it."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


@pytest.fixture(scope="module")
def table():
    return logits()


def test_the_first_row_has_no_zeros(table):
    assert table[0].all()


def test_the_last_row_has_no_zeros(table):
    assert table[-1].all()
