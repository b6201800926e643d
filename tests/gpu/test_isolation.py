"""Tests and functions in fresh processes, on a real device: what they take, they give back, and a leak is told."""

from __future__ import annotations

import os

import pynvml
import pytest

from pytest_vllm_cleanup import IsolatedProcessError, IsolatedTimeoutError, run_isolated
from pytest_vllm_cleanup.devices.visible import parse_visible

SIZE = 256 * 2**20  # bytes


def on_device() -> int:
    pynvml.nvmlInit()
    first, *_ = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES")) or (0,)
    handle = pynvml.nvmlDeviceGetHandleByIndex(first)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = on_device()
    yield
    assert on_device() - before < 16 * 2**20


def taken() -> int:
    import torch

    before = torch.cuda.mem_get_info()[0]
    kept = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    globals()["KEPT"] = kept
    return before - torch.cuda.mem_get_info()[0]


def test_a_function_gives_the_device_back_before_it_returns():
    before = on_device()
    assert run_isolated(taken, gpus=1) >= SIZE
    assert on_device() - before < 16 * 2**20


def a_tensor(device: str):
    import torch

    return torch.ones(3, device=device)


def test_a_tensor_of_the_device_is_refused_and_one_of_the_host_comes():
    assert run_isolated(lambda: a_tensor("cuda").cpu()).tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="tensor on cuda:0"):
        run_isolated(a_tensor, "cuda")


def hang() -> None:
    import time

    taken()
    time.sleep(600)


def die() -> None:
    taken()
    os.abort()


@pytest.mark.parametrize(
    ("function", "limit", "error"), [(hang, 20, IsolatedTimeoutError), (die, None, IsolatedProcessError)]
)
def test_a_function_that_hangs_or_dies_gives_the_device_back(function, limit, error):
    with pytest.raises(error):
        run_isolated(function, timeout=limit)


SUITE = """
    import os
    import subprocess
    import sys

    import pytest

    pytestmark = [pytest.mark.vllm_isolated, pytest.mark.gpu_released]
    KEPT = []

    def take(size):
        import torch

        KEPT.append(torch.ones(size, dtype=torch.uint8, device="cuda"))

    def test_keeps_nothing():
        take(1 << 20)
        KEPT.clear()

    def test_keeps_two_mib():
        take(2 << 20)

    def test_keeps_nothing_either():
        assert not KEPT

    def test_dies():
        take(64 << 20)
        os.abort()

    def test_comes_last():
        pass
"""


@pytest.mark.parametrize("warm", [(), ("--vllm-cleanup-isolate-warm",)], ids=["", "warm"])
def test_isolation_hides_no_leak_and_charges_nobody_else(run_suite, warm):
    result = run_suite(SUITE, *warm)
    result.assert_outcomes(passed=4, failed=1)
    for line in (
        "*::test_keeps_two_mib left 2 MiB (2097152 bytes) on cuda:0 by torch allocator*",
        "*SIGABRT*",
        "*1 failed, 4 passed*1 leaked*",
    ):
        result.stdout.fnmatch_lines([line])
