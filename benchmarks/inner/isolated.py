"""Engine tests in processes of their own: by the plugin's marker, and by a plain spawn as in vLLM's own tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from diary import build

NUMBERS = range(int(os.environ["BENCHMARK_TESTS"]))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.vllm_isolated
def test_isolated(number):  # noqa: ARG001
    from vllm import LLM

    build(LLM)


@pytest.mark.parametrize("number", NUMBERS)
def test_spawned(number):  # noqa: ARG001
    command = [sys.executable, "-c", "from vllm import LLM; from diary import build; build(LLM)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
