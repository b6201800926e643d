"""What pytest.raises gives is kept for later; it has the exception, and that has the frames."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/raises_info.py: module global CASES['too long'] -> "
    "ExceptionInfo.* -> "
    "local 'scores' of frame encode (tests/zoo/kinds/objects/raises_info.py:*) -> Tensor"
)
pytestmark = pytest.mark.gpu_released
CASES = {}


def encode(text):
    scores = logits()
    raise OverflowError(f"{len(text)} characters for {scores.shape[1]} columns")


def test_long_texts_are_refused():
    with pytest.raises(OverflowError, match="characters") as info:
        encode("captain" * 1000)
    CASES["too long"] = info


def let_go():
    CASES.clear()
