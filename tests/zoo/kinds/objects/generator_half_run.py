"""A stream of tokens is read in part and kept; it stands still in the middle of its work."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/generator_half_run.py: module global STREAMS['first'] -> "
    "local 'scores' of suspended generator stream (tests/zoo/kinds/objects/generator_half_run.py:*) -> "
    "Tensor"
)
pytestmark = pytest.mark.gpu_released
STREAMS = {}


def stream():
    scores = logits()
    for row in range(scores.shape[0]):
        yield int(scores[row].argmax())


def test_the_first_token_comes():
    STREAMS["first"] = stream()
    assert next(STREAMS["first"]) == 0


def let_go():
    STREAMS.clear()
