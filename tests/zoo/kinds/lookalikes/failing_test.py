"""A test fails, and its traceback has the tensor of its locals and those of what it called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = replace(CLEAN, test="failed")
pytestmark = pytest.mark.gpu_released


def check(scores):
    hidden = logits()
    assert hidden.sum() == 2 * scores.sum()


def test_the_sum_is_doubled():
    scores = logits()
    check(scores)
