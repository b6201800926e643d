"""A fixture fails while it is torn down, with a tensor in a local."""

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
    yield weights
    raise OSError(f"{weights.shape} cannot be saved")


def test_the_model_works(model):
    assert model.all()
