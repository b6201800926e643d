"""A tensor deep inside of a structure of plain containers."""

from __future__ import annotations

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/nested_containers.py: module global STATE['runs'][0]['outputs'][1][0] -> Tensor"
)
pytestmark = pytest.mark.gpu_released
STATE = {"runs": []}


def test_runs_are_recorded():
    STATE["runs"].append({"name": "first", "outputs": ("captain", [logits()])})
    assert STATE["runs"][0]["outputs"][1][0].all()


def let_go():
    STATE["runs"].clear()
