"""A report is to be written when Python exits, with the logits as an argument."""

from __future__ import annotations

import atexit

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*perhaps an atexit callback -> tuple[0] -> Tensor")
pytestmark = pytest.mark.gpu_released


def write_report(scores):
    return len(scores)


def test_a_report_is_planned():
    scores = logits()
    atexit.register(write_report, scores)
    assert scores.all()


def let_go():
    atexit.unregister(write_report)
