"""A tensor in a reference cycle waits for the collector."""

from __future__ import annotations

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_batches_are_linked():
    batch = {"logits": logits()}
    batch["batch"] = batch
    assert batch["logits"].all()
