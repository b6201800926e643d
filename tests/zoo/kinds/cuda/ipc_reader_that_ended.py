"""A tensor was sent to another process, which has read it and ended."""

from __future__ import annotations

import pytest
import torch.multiprocessing
from zoo_expect import CLEAN
from zoo_ipc import read
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_a_reader_gets_the_table():
    spawn = torch.multiprocessing.get_context("spawn")
    tensors, ready, stop = spawn.SimpleQueue(), spawn.Event(), spawn.Event()
    reader = spawn.Process(target=read, args=(tensors, ready, stop), daemon=True)
    reader.start()
    tensors.put(logits())
    assert ready.wait(60)
    stop.set()
    reader.join()


def let_go():
    torch.cuda.ipc_collect()
