"""A test is expected to fail, and does, with a tensor in a local."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = replace(CLEAN, test="xfailed")
pytestmark = pytest.mark.gpu_released


@pytest.mark.xfail(strict=True)
def test_scores_sum_up_to_nothing():
    scores = logits()
    assert scores.sum() == 0
