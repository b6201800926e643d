"""Engines whose constructor raises: nothing stays, whoever holds the exception, and the next one works."""

from __future__ import annotations

import contextlib
import gc
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
from engine_lab import Lab, run_pytest

from pytest_vllm_cleanup import close_engine
from pytest_vllm_cleanup.engines.drain import release_unreleased
from pytest_vllm_cleanup.engines.registry import registry

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def corrupt_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which the second half of the weights is missing."""
    folder = tmp_path_factory.mktemp("models") / "corrupt"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def failing_build(model: str, arguments: dict[str, Any], interrupted: bool, good: str) -> dict[str, Any]:
    """Fail to build an engine; measure while the exception is held, and after it was dropped; build a good one."""
    tools.warm_up(good)
    _fail(model, arguments, interrupted)  # loads the compilers that a warm-up served from a cache did not need
    release_unreleased()
    memory = tools.private_mib()
    held = _fail(model, arguments, interrupted)
    seen: dict[str, Any] = {"error": f"{type(held).__name__}: {held}", "hooks": tools.hooks()}
    seen["step errors"] = [error for handle in release_unreleased() if handle.report for error in handle.report.errors]
    seen["held"] = tools.private_mib() - memory
    del held
    gc.collect()
    seen["stayed"] = tools.private_mib() - memory
    seen["recorded"] = len(list(registry.handles()))
    llm = tools.build(good, enforce_eager=not interrupted)
    seen["tokens"] = len(tools.tokens(llm))
    seen["errors"] = close_engine(llm).errors
    seen["hooks in the end"] = tools.hooks()
    return seen


def _fail(model: str, arguments: dict[str, Any], interrupted: bool) -> BaseException | None:
    with _interrupted() if interrupted else contextlib.nullcontext():
        try:
            tools.build(model, **arguments)
        except BaseException as problem:
            return problem
    return None


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """Have Ctrl-C pressed while the model runs for the first time."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    def forward(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt("in the model")

    original, LlamaForCausalLM.forward = LlamaForCausalLM.forward, forward
    try:
        yield
    finally:
        LlamaForCausalLM.forward = original


@pytest.mark.parametrize(
    ("folder", "arguments", "interrupted", "error"),
    [
        ("model", {"quantization": "no such method"}, False, "no such method"),
        ("corrupt_model", {"enforce_eager": False}, False, "SafetensorError"),
        (
            "model",
            {"enforce_eager": False, "kv_cache_memory_bytes": 1 << 16},
            False,
            "No available memory for the cache blocks",
        ),
        ("model", {"kv_cache_memory_bytes": 1 << 50}, False, "is less than requested memory for kv"),
        ("model", {"enforce_eager": False}, True, "KeyboardInterrupt: in the model"),
    ],
    ids=["arguments", "weights", "KV cache too small", "KV cache too large", "interrupted in warm-up"],
)
def test_a_constructor_that_raises_leaves_nothing(
    lab: Lab,
    model: Path,
    request: pytest.FixtureRequest,
    folder: str,
    arguments: dict[str, Any],
    interrupted: bool,
    error: str,
) -> None:
    seen = lab(failing_build, request.getfixturevalue(folder), arguments, interrupted, model)
    assert error in seen["error"]
    assert seen["hooks"] == 0
    assert seen["step errors"] == []
    # What the exception's frames still hold is less than the tiny model's weights and their copies.
    assert seen["held"] < 30
    assert seen["stayed"] < 16
    assert seen["recorded"] == 0
    assert seen["tokens"] == 8
    assert seen["errors"] == []
    assert seen["hooks in the end"] == 0


INNER = """
import pytest
from vllm import SamplingParams

ENGINE = dict(dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20)

@pytest.mark.gpu_released
def test_fails(vllm_runner):
    vllm_runner({model!r}, **{{**ENGINE, "kv_cache_memory_bytes": 1 << 16}})

@pytest.mark.gpu_released
def test_works(vllm_runner):
    runner = vllm_runner({model!r}, enforce_eager=True, **ENGINE)
    assert len(runner.generate_greedy(["Hello"], 4)) == 1

@pytest.mark.gpu_released
def test_a_plain_engine_fails_and_is_kept():
    from vllm import LLM
    with pytest.raises(ValueError) as caught:
        LLM({model!r}, **{{**ENGINE, "kv_cache_memory_bytes": 1 << 16}})
    globals()["kept"] = caught

@pytest.mark.gpu_released
def test_works_again(vllm_runner):
    assert len(vllm_runner({model!r}, enforce_eager=True, **ENGINE).generate_greedy(["Hello"], 4)) == 1
"""


def test_a_failed_start_fails_its_test_with_vllms_words_and_no_leak(model: Path, tmp_path: Path) -> None:
    run = run_pytest(tmp_path, textwrap.dedent(INNER).format(model=str(model)))
    assert run.outcomes == {
        "test_fails": ["FAILED"],
        "test_works": ["PASSED"],
        "test_a_plain_engine_fails_and_is_kept": ["PASSED"],
        "test_works_again": ["PASSED"],
    }, run.output
    assert "No available memory for the cache blocks" in run.section("test_fails")
    assert run.status == 1
