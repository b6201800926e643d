"""Errors are collected to be counted at the end; their tracebacks hold the frames' locals."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/exception_in_list.py: module global ERRORS[0] -> "
    "ValueError.__traceback__ -> "
    "local 'scores' of frame decode (tests/zoo/kinds/objects/exception_in_list.py:*) -> Tensor"
)
pytestmark = pytest.mark.gpu_released
ERRORS = []


def decode(text):
    scores = logits()
    if not text:
        raise ValueError("nothing to decode")
    return scores.argmax()


def test_errors_are_counted():
    for text in ("", "the captain"):
        try:
            decode(text)
        except ValueError as error:
            ERRORS.append(error)
    assert len(ERRORS) == 1


def let_go():
    ERRORS.clear()
