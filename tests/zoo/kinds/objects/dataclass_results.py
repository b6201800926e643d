"""Results by name, each a dataclass with a list."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/dataclass_results.py: module global RESULTS['greedy'] -> Result.steps[0] -> Tensor"
)
pytestmark = pytest.mark.gpu_released
RESULTS: dict[str, Result] = {}


@dataclass
class Result:
    text: str
    steps: list[torch.Tensor] = field(default_factory=list)


def test_results_are_named():
    result = RESULTS.setdefault("greedy", Result("captain"))
    result.steps.append(logits())
    assert result.steps[0].all()


def let_go():
    RESULTS.clear()
