"""A graph is captured and kept with its input and output."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from zoo_expect import SIZE, Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/cuda/graph_with_output.py: module global GRAPHS['double'] -> Captured.* -> Tensor",
    stayed=2 * SIZE,
)
pytestmark = pytest.mark.gpu_released
GRAPHS: dict[str, Captured] = {}


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    input: torch.Tensor
    output: torch.Tensor


def capture(function, input):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(input)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(input)
    return Captured(graph, input, output)


def test_a_replayed_graph_doubles():
    captured = GRAPHS["double"] = capture(lambda input: input * 2, logits())
    captured.graph.replay()
    assert (captured.output == 2).all()


def let_go():
    GRAPHS.clear()
