"""Several engines in one process: closing one leaves the others whole."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
from engine_lab import Lab

from pytest_vllm_cleanup import close_engine
from pytest_vllm_cleanup.engines.drain import release_unreleased

pytestmark = pytest.mark.engine


def _pair(model: str, compiled_first: bool) -> list[Any]:
    return [tools.build(model, enforce_eager=eager) for eager in ((False, True) if compiled_first else (True, False))]


def close_one(model: str, compiled_first: bool, which: int, how: str) -> dict[str, Any]:
    tools.warm_up(model)
    import torch._dynamo

    resets, reset = [], torch._dynamo.reset
    torch._dynamo.reset = tools.preceded(reset, lambda: resets.append(1))
    environ = dict(os.environ)
    engines = _pair(model, compiled_first)
    before = [tools.tokens(engine) for engine in engines]
    gone, taken, errors = tools.watch(engines[which]), tools.private_mib(), []
    if how == "close_engine":
        errors = close_engine(engines[which]).errors
    elif how == "del":
        engines[which] = None
        gc.collect()
        release_unreleased()
    else:
        engines[which].llm_engine.engine_core.shutdown()
    resets_meanwhile = len(resets)
    given_back = taken - tools.private_mib()
    other = engines[1 - which]
    again = [tools.tokens(other) == before[1 - which] for _ in range(2)]
    seen = {"same tokens": again, "gone": gone(), "given back": given_back, "resets": resets_meanwhile}
    alive = tools.watch(other)
    seen["errors"] = errors + close_engine(other).errors
    if how == "shutdown":
        seen["errors"] += close_engine(engines[which]).errors
        seen["gone"] = gone()
    torch._dynamo.reset = reset
    return {
        **seen,
        "other gone": alive(),
        "hooks": tools.hooks(),
        "resets in the end": len(resets),
        "environ is back": dict(os.environ) == environ,
    }


WHOLE = {
    "same tokens": [True, True],
    "gone": [],
    "errors": [],
    "other gone": [],
    "hooks": 0,
    "resets": 0,
    "environ is back": True,
}


def _check(seen: dict[str, Any]) -> None:
    given_back = seen.pop("given back")
    assert seen.pop("resets in the end") == 1
    assert seen == WHOLE
    assert given_back > 0.75 * tools.KV_MIB


@pytest.mark.parametrize("which", [0, 1], ids=["the older", "the younger"])
@pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled then eager", "eager then compiled"])
def test_closing_one_of_two_engines_leaves_the_other_whole(
    lab: Lab, model: Path, compiled_first: bool, which: int
) -> None:
    _check(lab(close_one, model, compiled_first, which, "close_engine"))


def test_dropping_one_of_two_engines_leaves_the_other_whole(lab: Lab, model: Path) -> None:
    _check(lab(close_one, model, True, 0, "del"))


def test_the_users_own_shutdown_of_one_engine_leaves_the_other_whole(lab: Lab, model: Path) -> None:
    _check(lab(close_one, model, True, 0, "shutdown"))


def third_fails(model: str) -> dict[str, Any]:
    engines = _pair(model, True)
    before = [tools.tokens(engine) for engine in engines]
    hooks, memory, text = tools.hooks(), tools.private_mib(), ""
    try:
        tools.build(model, enforce_eager=False, kv_cache_memory_bytes=1 << 16)
    except ValueError as problem:
        text = str(problem)
    at_once = tools.hooks()
    release_unreleased()
    grown = tools.private_mib() - memory
    same = [[tools.tokens(engine) for engine in engines] == before for _ in range(2)]
    errors = [error for engine in engines for error in close_engine(engine).errors]
    return {"text": text, "hooks": [hooks, at_once], "grown": grown, "same": same, "errors": errors}


def test_a_third_engine_that_fails_to_start_leaves_both_whole(lab: Lab, model: Path) -> None:
    seen = lab(third_fails, model)
    assert "No available memory for the cache blocks" in seen["text"]
    assert seen["hooks"] == [1, 1]
    assert seen["grown"] < 40
    assert seen["same"] == [True, True]
    assert seen["errors"] == []
