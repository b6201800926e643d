"""A method of a model is given to a scheduler, which keeps it."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/bound_method.py: module global SCHEDULER -> "
    "Scheduler.jobs['step'] -> method Model.step -> Model.weights -> Tensor"
)
pytestmark = pytest.mark.gpu_released


class Scheduler:
    def __init__(self):
        self.jobs = {}


class Model:
    def __init__(self):
        self.weights = logits()

    def step(self):
        return self.weights.sum()


SCHEDULER = Scheduler()


def test_steps_are_scheduled():
    SCHEDULER.jobs["step"] = Model().step
    assert SCHEDULER.jobs["step"]()


def let_go():
    SCHEDULER.jobs.clear()
