"""A mock stands for a client, and remembers what it was called with."""

from __future__ import annotations

from unittest import mock

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/mock_call_arguments.py: module global CLIENT -> "
    "call arguments of mock 'client*' -> Tensor"
)
pytestmark = pytest.mark.gpu_released
CLIENT = mock.Mock(name="client")


def test_logits_are_sent():
    CLIENT.send("logits", logits())
    CLIENT.send.assert_called_once()


def let_go():
    CLIENT.reset_mock()
