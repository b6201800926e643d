"""A fixture that all tests use keeps a diary of what they saw."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/autouse_fixture.py: module global HISTORY['test_scores_are_positive']"
    "['scores'] -> Tensor"
)
pytestmark = pytest.mark.gpu_released
HISTORY = {}


@pytest.fixture(autouse=True)
def diary(request):
    entries = HISTORY[request.node.name] = {}
    return entries


def test_scores_are_positive(diary):
    diary["scores"] = logits()
    assert (diary["scores"] > 0).all()


def let_go():
    HISTORY.clear()
