"""Tests that leave nothing: many without an engine, some that share one, some that build their own."""

from __future__ import annotations

import os

import pytest
import torch
from diary import build, generate

pytestmark = pytest.mark.gpu_released
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("number", range(int(os.environ["BENCHMARK_TENSOR_TESTS"])))
def test_tensors(number):
    size = 256 * (1 + number % 8)
    left, right = (torch.rand(size, size, device=DEVICE, requires_grad=number % 2 == 0) for _ in range(2))
    product = torch.nn.functional.softmax(left @ right, dim=-1)
    if product.requires_grad:
        product.sum().backward()
    assert product.isfinite().all()


@pytest.fixture(scope="module")
def shared(vllm_runner_factory):
    return build(vllm_runner_factory)


HALF = pytest.mark.parametrize("number", range(int(os.environ["BENCHMARK_ENGINE_TESTS"]) // 2))


@HALF
def test_shared_engine(shared, number):  # noqa: ARG001
    generate(shared)


@HALF
def test_own_engine(vllm_runner, number):  # noqa: ARG001
    build(vllm_runner)
