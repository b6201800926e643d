"""A warning carries the tensor that it is about; pytest keeps it until it has noted the warnings of the test."""

from __future__ import annotations

import warnings

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*WarningMessage.message -> OddLogits.logits -> Tensor")
pytestmark = pytest.mark.gpu_released


class OddLogits(UserWarning):
    """Has the logits."""

    def __init__(self, logits):
        super().__init__("odd logits")
        self.logits = logits


@pytest.mark.filterwarnings("always")
def test_odd_logits_are_warned_of():
    warnings.warn(OddLogits(logits()), stacklevel=1)
