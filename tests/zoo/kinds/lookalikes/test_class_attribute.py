"""A test puts its tensor on its own instance, which pytest keeps."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


class TestModel:
    @pytest.fixture(autouse=True)
    def _load(self):
        self.weights = logits()

    def test_the_first_row_has_no_zeros(self):
        assert self.weights[0].all()

    def test_the_last_row_has_no_zeros(self):
        assert self.weights[-1].all()
