"""A thread that is never told to end has made a tensor of its own."""

from __future__ import annotations

import threading

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="thread 'prefetcher': local 'batch' of frame prefetch "
    "(tests/zoo/kinds/objects/thread_local_variable.py:*) -> Tensor"
)
pytestmark = pytest.mark.gpu_released
READY, STOP = threading.Event(), threading.Event()


def prefetch():
    batch = logits()
    READY.set()
    STOP.wait()
    return batch


def test_prefetching_starts():
    threading.Thread(target=prefetch, name="prefetcher", daemon=True).start()
    assert READY.wait(10)


def let_go():
    STOP.set()
    for thread in threading.enumerate():
        if thread.name == "prefetcher":
            thread.join()
