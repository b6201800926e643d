"""Tests with an engine whose workers are spread over several devices."""

from __future__ import annotations

import signal

import pytest
from diary import build, generate

pytestmark = pytest.mark.gpu_released
SECONDS = 60.0  # a call may wait for a dead worker for ever


def time_is_up(_number, _frame):
    raise TimeoutError(f"still generating after {SECONDS:g} s")


@pytest.fixture
def runner(vllm_runner):
    return build(vllm_runner)


def test_passes(runner):
    generate(runner)


def test_fails(runner):
    generate(runner)
    assert not runner


def test_is_hit(runner):
    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        while True:
            generate(runner)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
