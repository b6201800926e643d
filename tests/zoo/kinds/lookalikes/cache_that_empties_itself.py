"""A cache is emptied by a timer, soon after the test."""

from __future__ import annotations

import threading

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
CACHE = {}


def test_entries_expire():
    CACHE["captain"] = logits()
    threading.Timer(1.0, CACHE.clear).start()
    assert CACHE["captain"].all()
