"""A test fails with an exception that was raised from another one, which came while a third was handled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = replace(CLEAN, test="failed")
pytestmark = pytest.mark.gpu_released


def load(name):
    weights = logits()
    raise KeyError(name, weights.shape)


def load_again(name):
    try:
        load(name)
    except KeyError:
        copy = logits()
        raise LookupError(name, copy.shape)  # noqa: B904


def test_the_model_is_found():
    try:
        load_again("tiny")
    except LookupError as error:
        raise RuntimeError("no model") from error
