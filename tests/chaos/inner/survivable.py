"""Deaths that a test run survives. Each test has built an engine when it dies, but for those that cannot build one."""

from __future__ import annotations

import os
import signal
import time

import pytest
from chaos_engines import (
    CORRUPT,
    ENGINE,
    IN_PROCESS,
    MODEL,
    WARMING_UP,
    WITH_WORKER,
    as_soon_as,
    build,
    core,
    generate,
    has_core,
    inside,
    worker,
)

pytestmark = pytest.mark.gpu_released
# vLLM's generate() may raise when the engine is dead, or wait for ever if that happens at the wrong moment.
bounded = pytest.mark.timeout(5, method="signal", func_only=True)
only_in_child_processes = pytest.mark.skipif(IN_PROCESS, reason="the engine has no processes")


@pytest.fixture
def engine(vllm_runner):
    return build(vllm_runner)


@pytest.fixture
def engine_with_worker(vllm_runner):
    return build(vllm_runner, **WITH_WORKER)


def test_assert(engine):
    assert not engine


def test_bad_arguments(vllm_runner):
    vllm_runner(MODEL, **ENGINE, quantization="no such method")


@pytest.mark.xfail(strict=True)
def test_xfail(engine):
    assert not engine


def test_corrupt_weights(vllm_runner):
    vllm_runner(CORRUPT, **ENGINE)


@pytest.mark.timeout(2, method="signal", func_only=True)
def test_timeout_by_signal(engine):
    time.sleep(60)


def test_kv_cache_too_large(vllm_runner):
    vllm_runner(MODEL, **{**ENGINE, "kv_cache_memory_bytes": 1 << 50})


@only_in_child_processes
@bounded
def test_segfault_of_the_core(engine):
    os.kill(core().pid, signal.SIGSEGV)
    generate(engine)


def test_interrupted_in_warm_up(vllm_runner):
    # A core takes its title when it has imported vLLM, and then loads the model and runs it.
    as_soon_as(inside(WARMING_UP) if IN_PROCESS else has_core, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        vllm_runner(MODEL, **{**ENGINE, "enforce_eager": not IN_PROCESS})


@only_in_child_processes
@bounded
def test_sigkill_of_the_core(engine):
    os.kill(core().pid, signal.SIGKILL)
    generate(engine)


@only_in_child_processes
@bounded
def test_sigkill_of_a_worker(engine_with_worker):
    os.kill(worker().pid, signal.SIGKILL)
    generate(engine_with_worker)


@only_in_child_processes
def test_stuck_core(engine):
    os.kill(core().pid, signal.SIGSTOP)


@only_in_child_processes
def test_stuck_worker(engine_with_worker):
    os.kill(worker().pid, signal.SIGSTOP)


def test_out_of_memory(engine):
    import torch

    kept = []
    if torch.cuda.is_available():
        size = 1 << 33
        while size > 1 << 21:
            try:
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
    kept.append(torch.empty(1 << 50, dtype=torch.uint8, device="cuda" if kept else "cpu"))


def test_nothing_happens(engine):
    assert generate(engine)
