"""The gauge of this process, which knows the processes of its engines as its own."""

from __future__ import annotations

import os

from pytest_vllm_cleanup.engines import traces
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.memory import Gauge, choose_gauge

_gauges: dict[int, Gauge] = {}


def current_gauge() -> Gauge:
    """Return the gauge of this process; chosen at the first call, by what the machine and vLLM are."""
    me = os.getpid()
    if me not in _gauges:
        _gauges[me] = choose_gauge(our_processes)
    return _gauges[me]


def our_processes() -> frozenset[int]:
    """Return the ids of this process, its descendants, and the recorded processes of its engines."""
    recorded = {child.pid for handle in registry.handles() for child in handle.traces.children}
    return frozenset({os.getpid(), *recorded, *(child.pid for child in traces.children())})
