"""Only the graph is kept: no tensor lives, but the memory that it was captured with is its own."""

from __future__ import annotations

import pytest
import torch
from zoo_expect import DEVICE, MIB, Expect

# More than what one test may leave below or inside the allocator without a tensor to show for it.
EXPECT = Expect(
    reason="allocator cache",
    holder="tests/zoo/kinds/cuda/graph_alone.py: module global GRAPHS[0] -> CUDAGraph",
    stayed=None,
)
pytestmark = pytest.mark.gpu_released
GRAPHS = []


def test_a_graph_is_replayed():
    graph, rows = torch.cuda.CUDAGraph(), torch.ones(1024, 1, device=DEVICE)
    rows.expand(1024, 4).clone().sum()  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rows.expand(1024, MIB // 4).clone().sum()  # 1 GiB for a moment
    GRAPHS.append(graph)
    graph.replay()
    torch.cuda.synchronize()


def let_go():
    GRAPHS.clear()
