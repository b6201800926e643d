"""A fixture of a test class has a table, between tests that do not use it."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


@pytest.fixture(scope="class")
def table():
    return logits()


def test_before():
    assert logits().all()


class TestTable:
    def test_the_first_row_has_no_zeros(self, table):
        assert table[0].all()

    def test_in_between(self):
        assert logits().all()

    def test_the_last_row_has_no_zeros(self, table):
        assert table[-1].all()


def test_after():
    assert logits().all()
