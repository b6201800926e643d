import os
from pathlib import Path
from typing import Any

import pytest

# Engines in this very process, where one stray reference keeps all their memory. vLLM's default is a child process
# for each engine; vllm_runner closes both kinds.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

from pytest_vllm_cleanup.testing import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights, 3 MB, written here: nothing is downloaded."""
    return tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Arguments that make an engine start within seconds."""
    return {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 256 * 2**20,
        "enforce_eager": True,
        # vLLM's bfloat16 kernels need instructions that not every CPU has.
        "dtype": "auto" if torch.cuda.is_available() else "float32",
    }
