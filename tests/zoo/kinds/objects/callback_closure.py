"""A callback is registered and never removed; it closes over the logits."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/callback_closure.py: module global LISTENERS['token'][0] -> "
    "closure variable 'scores' of test_listeners_are_told.<locals>.on_token -> Tensor"
)
pytestmark = pytest.mark.gpu_released
LISTENERS = {"token": []}


def test_listeners_are_told():
    scores = logits()

    def on_token(token):
        return scores[0, token]

    LISTENERS["token"].append(on_token)
    assert all(listener(0) for listener in LISTENERS["token"])


def let_go():
    LISTENERS["token"].clear()
