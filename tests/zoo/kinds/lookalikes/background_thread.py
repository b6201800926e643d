"""A thread that the test does not wait for has a tensor, and ends soon after."""

from __future__ import annotations

import threading
import time

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def save():
    table = logits()
    time.sleep(1.0)
    assert table.all()


def test_saving_starts():
    thread = threading.Thread(target=save)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
