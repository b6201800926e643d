import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines in this process

import torch

from pytest_vllm_cleanup.testing import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def small():
    return {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 * 2**20,
        "enforce_eager": True,
        "dtype": "auto" if torch.cuda.is_available() else "float32",
    }
