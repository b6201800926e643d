"""A unittest test case with setUp, and nothing in tearDown."""

from __future__ import annotations

import unittest

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


class TestModel(unittest.TestCase):
    def setUp(self):
        self.weights = logits()

    def test_rows(self):
        for row in (0, -1):
            with self.subTest(row=row):
                assert self.weights[row].all()
