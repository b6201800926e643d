"""Tests for a run of pytest-xdist: the worker of the first one is killed, and another one takes the next."""

from __future__ import annotations

import time

from chaos_diary import note
from chaos_engines import build


def test_worker_is_killed(vllm_runner):
    build(vllm_runner)
    note("ready")
    time.sleep(120)


def test_next(vllm_runner):
    build(vllm_runner)
