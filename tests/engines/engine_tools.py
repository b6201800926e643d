"""What scenarios do with engines. Runs inside a lab; torch and vLLM are imported by the functions that need them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from pytest_vllm_cleanup import CloseReport, close_engine
from pytest_vllm_cleanup.engines import instrument, shells
from pytest_vllm_cleanup.engines.measure import current_gauge

MIB = 2**20
KV_MIB = 128
PROMPT = "The captain walked slowly along the shore"


def build(model: str, **arguments: Any) -> Any:
    """Build an engine whose KV cache takes ``KV_MIB``: eager if nothing else is said, and watched."""
    instrument.install()
    return build_unseen(model, **arguments)


def build_unseen(model: str, **arguments: Any) -> Any:
    """Build an engine that nobody watches, unless somebody did before."""
    from vllm import LLM

    # bfloat16 attention of vLLM 0.32 uses instructions that some processors report and do not have.
    usual = {
        "dtype": "float32",
        "kv_cache_memory_bytes": KV_MIB * MIB,
        "max_model_len": 256,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    return LLM(**{"model": model, **usual, **arguments})


def warm_up(model: str) -> None:
    """Pay once what only the first engine of a process costs, so that memory can be compared afterwards."""
    if not _warm:
        _warm.append(True)
        close_engine(build(model))


_warm: list[bool] = []


def tokens(llm: Any, prompt: str = PROMPT, count: int = 8) -> list[int]:
    """Generate greedily and return the token ids."""
    from vllm import SamplingParams

    outputs = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=count), use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


def private_mib() -> float:
    """Return the private memory of this process in MiB."""
    own = current_gauge().read()["host"].own
    assert own is not None
    return own / MIB


def core_of(llm: Any) -> Any:
    """Return the engine core of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def watch(llm: Any) -> Callable[[], list[str]]:
    """Return a function that names those of an engine's heavy parts that still exist."""
    parts = shells.chain(core_of(llm))
    parts["KV cache"] = runner_of(llm).kv_caches[0]
    parts["parameter"] = next(runner_of(llm).model.parameters())
    names = ("core", "runner", "model", "KV cache", "parameter")
    references = {name: weakref.ref(parts[name]) for name in names}
    return lambda: [name for name, reference in references.items() if reference() is not None]


def preceded(function: Callable[..., Any], action: Callable[[], object]) -> Callable[..., Any]:
    """Return the function with something that is called before it."""

    def both(*arguments: Any) -> Any:
        action()
        return function(*arguments)

    return both


def hooks() -> int:
    """Return how many bytecode hooks are registered in this process."""
    import torch._dynamo.convert_frame as convert_frame

    return len(convert_frame._bytecode_hooks)


def as_data(report: CloseReport) -> dict[str, Any]:
    """Return a report as plain data."""
    return {
        "steps": [name for name, _, _ in report.steps],
        "seconds": [seconds for _, seconds, _ in report.steps],
        "errors": report.errors,
        "alive": report.alive,
        "collections": report.collections,
    }
