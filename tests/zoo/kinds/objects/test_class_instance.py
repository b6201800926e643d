"""A method of the test's own instance is registered, and the instance has the tensor."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/test_class_instance.py: module global HANDLERS[0] -> "
    "method TestModel.on_step -> TestModel.weights -> Tensor"
)
pytestmark = pytest.mark.gpu_released
HANDLERS = []


class TestModel:
    def on_step(self):
        return self.weights.sum()

    def test_steps_are_observed(self):
        self.weights = logits()
        HANDLERS.append(self.on_step)
        assert HANDLERS[0]()


def let_go():
    HANDLERS.clear()
