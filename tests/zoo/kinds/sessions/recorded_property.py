"""A tensor is recorded as a property of the test, which pytest keeps to the end of the session."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="*user_properties*-> Tensor")
pytestmark = pytest.mark.gpu_released


def test_the_loss_is_recorded(record_property):
    record_property("loss", logits())
