"""What a class of unittest tests has set up for all of them, nobody tears down."""

from __future__ import annotations

import unittest

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/unittest_class_attribute.py: class attribute TestModel.weights -> Tensor",
    owner="*setUpClass*TestModel*",
)
pytestmark = pytest.mark.gpu_released


class TestModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.weights = logits()

    def test_the_first_row_has_no_zeros(self):
        assert self.weights[0].all()

    def test_the_last_row_has_no_zeros(self):
        assert self.weights[-1].all()


def let_go():
    del TestModel.weights
