"""An engine that cannot start because of a leak is refused before anything of it runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine_lab import IN_CHILD_PROCESSES, InnerRun, run_pytest

pytestmark = pytest.mark.engine

FAKE = Path(__file__).parents[1] / "plugin" / "fake_gpu.py"
CONFTEST = """
import pytest
from pytest_vllm_cleanup.engines import needs
pytest_plugins = ["fake_gpu"]
# Here it is the CPU worker that runs beside a GPU, and it asks for nothing there.
needs._CHECKS_FREE_MEMORY |= {"vllm.v1.worker.cpu_worker.CPUWorker"}
"""
SUITE = """
import os
import psutil
import pytest
from fake_gpu import MIB, gpu
from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.engine.arg_utils import AsyncEngineArgs
from pytest_vllm_cleanup import DeviceQuarantinedError, close_engine
from pytest_vllm_cleanup.engines.registry import registry

MODEL = os.environ["MODEL"]
ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 * MIB,
              gpu_memory_utilization=0.9)
before = {}

def children():
    found = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in found if "pytest_vllm_cleanup" not in line]  # the helper that outlives this process

@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 13 << 30
    before.update(environ=dict(os.environ))

def test_llm_is_refused():
    LLM(MODEL, **ENGINE)

def test_async_llm_is_refused():
    with pytest.raises(DeviceQuarantinedError):
        AsyncLLM.from_engine_args(AsyncEngineArgs(MODEL, **ENGINE))

def test_nothing_is_left_of_them():
    pass  # what they left is taken away before a checked test

@pytest.mark.gpu_released
def test_everything_is_as_before():
    assert children() == []
    assert list(registry.handles()) == []
    changed = set(os.environ.items()) ^ set(before["environ"].items())
    assert {name for name, _ in changed} <= {"PYTEST_CURRENT_TEST"}

def test_another_failure_names_the_leak():
    LLM(MODEL, **{**ENGINE, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1})

def test_it_starts_when_the_memory_is_back():
    gpu.allocated -= 13 << 30
    llm = LLM(MODEL, **ENGINE)
    assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids
    close_engine(llm)
"""


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> InnerRun:
    folder = tmp_path_factory.mktemp("quarantine")
    shutil.copy(FAKE, folder)
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return run_pytest(folder, SUITE, {**IN_CHILD_PROCESSES, "MODEL": str(model), "PYTEST_VLLM_CLEANUP_TIMEOUT": "0"})


def test_every_engine_that_needs_the_leaked_memory_is_refused_and_no_other(seen: InnerRun) -> None:
    assert seen.outcomes == {
        "test_leak": ["PASSED", "LEAKED"],
        "test_llm_is_refused": ["FAILED"],
        "test_async_llm_is_refused": ["PASSED"],
        "test_nothing_is_left_of_them": ["PASSED"],
        "test_everything_is_as_before": ["PASSED"],
        "test_another_failure_names_the_leak": ["FAILED"],
        "test_it_starts_when_the_memory_is_back": ["PASSED"],
    }, seen.output


def test_the_refusal_names_the_culprit(seen: InnerRun) -> None:
    text = seen.section("test_llm_is_refused")
    assert (
        "DeviceQuarantinedError: cuda:0 has 66.4 GiB of 80 GiB free, and this engine asks for 72 GiB "
        "(gpu_memory_utilization 0.9). In its way: test test_inner.py::test_leak left 13 GiB on cuda:0"
    ) in text
    assert "still there" not in text


def test_an_engine_that_fails_otherwise_has_the_leak_in_its_section(seen: InnerRun) -> None:
    text = seen.section("test_another_failure_names_the_leak")
    assert "DeviceQuarantinedError" not in text
    assert "- GPU memory -" in text
    assert "still there from an earlier leak: test test_inner.py::test_leak left 13 GiB on cuda:0" in text
