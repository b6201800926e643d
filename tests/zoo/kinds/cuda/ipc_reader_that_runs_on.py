"""A tensor is sent to another process, which still has it: this one may not free it."""

from __future__ import annotations

import pytest
import torch.multiprocessing
from zoo_expect import Expect
from zoo_ipc import read
from zoo_tensors import logits

EXPECT = Expect(says=("*IPC*",), stayed=None)
pytestmark = pytest.mark.gpu_released
READERS = []


def test_a_reader_gets_the_table():
    spawn = torch.multiprocessing.get_context("spawn")
    tensors, ready, stop = spawn.SimpleQueue(), spawn.Event(), spawn.Event()
    reader = spawn.Process(target=read, args=(tensors, ready, stop), daemon=True)
    reader.start()
    READERS.append((reader, stop))
    tensors.put(logits())
    assert ready.wait(60)


def let_go():
    for reader, stop in READERS:
        stop.set()
        reader.join()
    READERS.clear()
    torch.cuda.ipc_collect()
