"""What pytest.raises gives stays a local."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def encode(text):
    scores = logits()
    raise OverflowError(f"{len(text)} characters for {scores.shape[1]} columns")


def test_long_texts_are_refused():
    with pytest.raises(OverflowError) as info:
        encode("captain" * 1000)
    assert "7000 characters" in str(info.value)
