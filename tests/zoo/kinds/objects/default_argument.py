"""A default argument is changed by the function that has it."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/objects/default_argument.py: default argument history[0] of generate -> Tensor")
pytestmark = pytest.mark.gpu_released


def generate(prompt, history=[]):  # noqa: B006
    history.append(logits())
    return prompt + str(len(history))


def test_answers_are_numbered():
    assert generate("captain").endswith("1")


def let_go():
    generate.__defaults__[0].clear()
