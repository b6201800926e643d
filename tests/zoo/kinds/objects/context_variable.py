"""A context variable is set and never reset."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import pytest
import torch
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="context variable 'current_request' -> Request.logits -> Tensor")
pytestmark = pytest.mark.gpu_released
current_request: ContextVar[Request | None] = ContextVar("current_request", default=None)


@dataclass
class Request:
    text: str
    logits: torch.Tensor


def test_the_request_is_known_everywhere():
    current_request.set(Request("the captain", logits()))
    assert current_request.get().logits.all()


def let_go():
    current_request.set(None)
