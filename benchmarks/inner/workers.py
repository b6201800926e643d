"""Tests for workers on real GPUs. Each notes on which devices it and its engine are, and who else is there."""

from __future__ import annotations

import atexit
import os
import signal
import time

import pynvml
import pytest
from diary import build, note

from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.processes import marks

TESTS = int(os.environ.get("BENCHMARK_TESTS", "16"))
KILLS = frozenset(map(int, filter(None, os.environ.get("BENCHMARK_KILLS", "").split(","))))
KEPT = []
pytestmark = pytest.mark.gpu_released


def handles():
    """The visible devices, by what stands in the variable."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    texts = map(str, range(pynvml.nvmlDeviceGetCount())) if named is None else named.split(",")
    all_of_them = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    by_uuid = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in all_of_them}
    return [
        all_of_them[int(text)] if text.isdecimal() else next(by_uuid[uuid] for uuid in by_uuid if uuid.startswith(text))
        for text in texts
    ]


def ours():
    return {os.getpid(), *(process.pid for process in marks.started_by_me())}


def listed(handle):
    return {use.pid: use.usedGpuMemory or 0 for use in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def met():
    """Bytes of others on the visible devices."""
    mine = ours()
    return sum(size for handle in handles() for pid, size in listed(handle).items() if pid not in mine)


def engine_on():
    """The UUIDs of all devices on which a process of this worker is."""
    mine = ours()
    every = (pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount()))
    return sorted(pynvml.nvmlDeviceGetUUID(handle) for handle in every if mine & listed(handle).keys())


class Starts:
    """Notes when engines start, which is after their turn has come, when they are up, and when they are closed."""

    def before_build(self, handle):
        note("starts", engine=handle.number)

    def after_build(self, handle):
        note("failed" if handle.failure else "up", engine=handle.number)

    def after_close(self, handle):
        note("closed", engine=handle.number)


@pytest.fixture(autouse=True, scope="session")
def starts():
    registry.listeners.append(Starts())
    atexit.register(note, "leaves")


@pytest.fixture(autouse=True)
def diary(request):
    pynvml.nvmlInit()
    facts = {
        "test": request.node.name,
        "worker": os.environ.get("PYTEST_XDIST_WORKER", ""),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "uuids": [pynvml.nvmlDeviceGetUUID(handle) for handle in handles()],
        "port": os.environ.get("VLLM_PORT"),
    }
    note("begins", met=met(), **facts)
    yield
    note("ends", met=met(), **facts)


def test_leak():
    import torch

    KEPT.append(torch.ones(3 << 30, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("number", range(TESTS))
def test_engine(vllm_runner, number):
    build(vllm_runner)
    note("engine", test=f"test_engine[{number}]", worker=os.environ.get("PYTEST_XDIST_WORKER", ""), on=engine_on())
    if number in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.vllm_isolated
@pytest.mark.parametrize("number", range(TESTS))
def test_isolated(vllm_runner, number):  # noqa: ARG001
    build(vllm_runner)


@pytest.mark.gpus(2)
def test_engine_over_two(vllm_runner, gpu_devices):
    build(lambda *args, **more: vllm_runner(*args, tensor_parallel_size=len(gpu_devices), **more))
    note("engine", test="test_engine_over_two", on=engine_on())


@pytest.mark.parametrize("number", range(24))
def test_light(number):  # noqa: ARG001
    time.sleep(0.05)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("number", range(6))
def test_light_on_two(gpu_devices, number):  # noqa: ARG001
    assert len(gpu_devices) == 2
    time.sleep(0.05)
