"""Outputs are collected in a list of the module, and each has its logits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(holder="tests/zoo/kinds/objects/global_list.py: module global OUTPUTS[0] -> Output.logits -> Tensor")
pytestmark = pytest.mark.gpu_released
OUTPUTS: list[Output] = []


@dataclass
class Output:
    text: str
    logits: torch.Tensor


def test_outputs_are_plausible():
    output = Output("the captain walked", logits())
    OUTPUTS.append(output)
    assert output.logits.all()


def let_go():
    OUTPUTS.clear()
