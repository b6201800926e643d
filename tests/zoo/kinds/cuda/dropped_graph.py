"""A graph is captured, replayed and dropped."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_a_replayed_graph_doubles():
    table, graph = logits(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        double = table * 2
    graph.replay()
    assert (double == 2).all()
