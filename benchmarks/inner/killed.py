"""A test that goes on until it is killed."""

from __future__ import annotations

import os
import time

from diary import build, generate, note

note("importing")

import torch  # noqa: E402, F401
import vllm  # noqa: E402, F401


def test_generates(vllm_runner):
    runner = build(vllm_runner)
    end = time.monotonic() + float(os.environ["BENCHMARK_GENERATE"])
    while time.monotonic() < end:
        generate(runner)
