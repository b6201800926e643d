"""A fixture fails while it is set up, with a tensor in a local."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = replace(CLEAN, test="failed")
pytestmark = pytest.mark.gpu_released


@pytest.fixture
def model():
    weights = logits()
    raise FileNotFoundError(f"no tokenizer for {weights.shape}")


def test_the_model_works(model):
    raise AssertionError("never called")
