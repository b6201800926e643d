"""A value that a test is parametrised with lives as long as pytest, and the test fills it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="parameter 'batch' of test 'test_batches_are_filled[short]' -> SimpleNamespace.logits -> Tensor")
pytestmark = pytest.mark.gpu_released
FILLED = []


@pytest.mark.parametrize("batch", [SimpleNamespace(text="captain")], ids=["short"])
def test_batches_are_filled(batch):
    batch.logits = logits()
    assert batch.logits.all()


def let_go():
    for mark in test_batches_are_filled.pytestmark:
        if mark.name == "parametrize":
            del mark.args[1][0].logits
