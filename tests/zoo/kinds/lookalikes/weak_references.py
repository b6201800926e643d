"""A cache holds what it has weakly."""

from __future__ import annotations

import weakref

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
CACHE = weakref.WeakValueDictionary()
SEEN = []


def test_weights_are_shared_while_they_are_used():
    weights = CACHE.setdefault("tiny", logits())
    SEEN.append(weakref.ref(weights))
    assert CACHE["tiny"] is weights
