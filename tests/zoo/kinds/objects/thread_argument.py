"""A thread that is never told to end was started with the tensor as its argument."""

from __future__ import annotations

import threading

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="thread 'uploader': local 'batch' of frame upload (tests/zoo/kinds/objects/thread_argument.py:*) -> Tensor"
)
pytestmark = pytest.mark.gpu_released
STOP = threading.Event()


def upload(batch, stop):
    while not stop.wait(0.05):
        batch[0, 0] += 1


def test_upload_starts():
    thread = threading.Thread(target=upload, args=(logits(), STOP), name="uploader", daemon=True)
    thread.start()
    assert thread.is_alive()


def let_go():
    STOP.set()
    for thread in threading.enumerate():
        if thread.name == "uploader":
            thread.join()
