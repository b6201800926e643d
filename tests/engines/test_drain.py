"""Freeing an engine in this process: hooks first, every step guarded and timed, whatever the caller still holds."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
from engine_lab import Lab

import pytest_vllm_cleanup
from pytest_vllm_cleanup import close_engine
from pytest_vllm_cleanup.engines import shells
from pytest_vllm_cleanup.engines.drain import release_unreleased

pytestmark = pytest.mark.engine

NEARLY_ALL_BACK = 40  # MiB, where the engine takes tools.KV_MIB and its weights
STEPS = [
    "release its bytecode hooks",
    "wake it",
    "unbind the KV cache",
    "keep the allocators of its pools",
    "shut its core down",
    "clear its CUDA graphs",
    "empty its shells",
    "part from the engine object",
    "delete compiled functions from model modules",
    "release vLLM's process-wide holders",
    "clear LRU caches that hold tensors",
    "reset Dynamo",
    "destroy process groups",
    "restore threads",
    "give back environment variables",
    "collect garbage",
    "release memory pools",
    "flush device caches",
]


# --- bytecode hooks ---


def stored_handle(model: str) -> dict[str, Any]:
    llm = tools.build(model, enforce_eager=False)
    handle, removals = _wrapper(llm)._bytecode_hook_handle, []
    handle.remove = tools.preceded(handle.remove, lambda: removals.append(1))
    before, alive = tools.hooks(), tools.watch(llm)
    report = close_engine(llm)
    return {
        "before": before,
        "removed by the handle": bool(removals),
        "after": tools.hooks(),
        "errors": report.errors,
        "alive": alive(),
    }


def test_the_stored_handle_is_removed(lab: Lab, model: Path) -> None:
    seen = lab(stored_handle, model)
    assert seen == {"before": 1, "removed by the handle": True, "after": 0, "errors": [], "alive": []}


def no_stored_handle(model: str) -> dict[str, Any]:
    llm = tools.build(model, enforce_eager=False)
    _as_up_to_0_22(llm)
    before, alive = tools.hooks(), tools.watch(llm)
    report = close_engine(llm)
    return {"before": before, "after": tools.hooks(), "errors": report.errors, "alive": alive()}


def test_a_hook_without_a_stored_handle_is_removed_by_owner(lab: Lab, model: Path) -> None:
    assert lab(no_stored_handle, model) == {"before": 1, "after": 0, "errors": [], "alive": []}


def failing_cleanup(model: str) -> dict[str, Any]:
    def broken() -> None:
        raise RuntimeError("the handle is gone")

    llm = tools.build(model, enforce_eager=False)
    object.__setattr__(_wrapper(llm), "cleanup", broken)
    before, alive = tools.hooks(), tools.watch(llm)
    report = close_engine(llm)
    return {"before": before, "after": tools.hooks(), "errors": report.errors, "alive": alive()}


def test_a_hook_is_removed_also_when_vllms_own_cleanup_raises(lab: Lab, model: Path) -> None:
    seen = lab(failing_cleanup, model)
    assert seen["before"] == 1
    assert seen["after"] == 0
    assert seen["errors"][0] == "release its bytecode hooks: RuntimeError: the handle is gone"
    assert seen["alive"] == []


def foreign_hooks(model: str) -> dict[str, Any]:
    from torch._dynamo.convert_frame import _bytecode_hooks, register_bytecode_hook

    class Users:
        def hook(self, old: Any, new: Any) -> None:
            """Change nothing."""

    before, during, after = Users().hook, Users().hook, Users().hook
    handles = [register_bytecode_hook(before)]
    with _during_profiling(lambda: handles.append(register_bytecode_hook(during))):
        llm = tools.build(model, enforce_eager=False)
    handles.append(register_bytecode_hook(after))
    live = tools.hooks()
    close_engine(llm)
    left = list(_bytecode_hooks.values())
    for handle in handles:
        handle.remove()
    return {"live": live, "kept": [hook in left for hook in (before, during, after)], "left": len(left)}


def test_a_hook_that_the_user_registered_survives(lab: Lab, model: Path) -> None:
    assert lab(foreign_hooks, model) == {"live": 4, "kept": [True, True, True], "left": 3}


def dropped(model: str) -> dict[str, Any]:
    before = tools.private_mib()
    llm = tools.build(model, enforce_eager=False)
    _as_up_to_0_22(llm)
    live, taken, alive = tools.hooks(), tools.private_mib() - before, tools.watch(llm)
    del llm
    at_once = tools.hooks()
    released = [handle.report.errors for handle in release_unreleased() if handle.report is not None]
    stayed = tools.private_mib() - before
    return {
        "hooks": [live, at_once],
        "released": released,
        "alive": alive(),
        "taken": taken,
        "stayed": stayed,
    }


def test_the_finalizer_runs_without_dunder_del(lab: Lab, model: Path) -> None:
    seen = lab(dropped, model)
    assert seen["hooks"] == [1, 0]
    assert seen["released"] == [[]]
    assert seen["alive"] == []
    assert seen["taken"] > tools.KV_MIB
    assert seen["stayed"] < NEARLY_ALL_BACK


def test_no_class_of_the_package_defines_dunder_del() -> None:
    files = list(Path(pytest_vllm_cleanup.__file__).parent.rglob("*.py"))
    definitions = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert len(files) > 40
    assert definitions == []


# --- the whole drain ---


def compiled_cycles(model: str, count: int) -> dict[str, Any]:
    import torch._dynamo

    from pytest_vllm_cleanup.engines import traces

    resets, reset = [], torch._dynamo.reset
    torch._dynamo.reset = tools.preceded(reset, lambda: resets.append(1))
    cycles = []
    try:
        for _ in range(count):
            before = tools.private_mib()
            llm = tools.build(model, enforce_eager=False)
            tools.tokens(llm)
            alive, taken = tools.watch(llm), tools.private_mib() - before
            compiled = len(traces.compiled_globals())
            report = tools.as_data(close_engine(llm))
            cycles.append(
                {
                    "alive": alive(),  # although llm is still held here
                    "taken": taken,
                    "before": before,
                    "after": tools.private_mib(),
                    "compiled": [compiled, len(traces.compiled_globals())],
                    "resets": len(resets),
                    "report": report,
                }
            )
            resets.clear()
    finally:
        torch._dynamo.reset = reset
    return {"cycles": cycles}


@pytest.fixture(scope="module")
def cycles(lab: Lab, model: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lab(compiled_cycles, model, 4)["cycles"]
    return found


def test_deleting_an_in_process_engine_frees_it(cycles: list[dict[str, Any]]) -> None:
    assert [cycle["alive"] for cycle in cycles] == [[]] * 4
    assert [cycle["report"]["alive"] for cycle in cycles] == [[]] * 4
    assert all(cycle["taken"] > tools.KV_MIB for cycle in cycles)
    assert all(cycle["after"] - cycle["before"] < NEARLY_ALL_BACK for cycle in cycles)


def test_memory_does_not_grow_from_engine_to_engine(cycles: list[dict[str, Any]]) -> None:
    after = [cycle["after"] for cycle in cycles]
    growth = [later - earlier for earlier, later in itertools.pairwise(after[1:])]
    assert max(growth) < 12, after


def test_compiled_functions_are_gone_from_model_modules(cycles: list[dict[str, Any]]) -> None:
    assert all(cycle["compiled"][0] > 0 for cycle in cycles)
    assert [cycle["compiled"][1] for cycle in cycles] == [0] * 4


def test_dynamo_is_reset_at_teardown(cycles: list[dict[str, Any]]) -> None:
    assert [cycle["resets"] for cycle in cycles] == [1] * 4


def test_every_step_is_named_and_timed_and_hooks_go_first(cycles: list[dict[str, Any]]) -> None:
    report = cycles[0]["report"]
    assert report["steps"] == STEPS
    assert report["errors"] == []
    assert all(0 <= seconds < 5 for seconds in report["seconds"])
    assert sum(report["seconds"]) > 0.05


def test_one_collection_is_enough(cycles: list[dict[str, Any]]) -> None:
    assert [cycle["report"]["collections"] for cycle in cycles] == [1] * 4


def hooks_at_shutdown(model: str) -> list[int]:
    llm = tools.build(model, enforce_eager=False)
    executor, seen = tools.core_of(llm).model_executor, [tools.hooks()]
    executor.shutdown = tools.preceded(executor.shutdown, lambda: seen.append(tools.hooks()))
    llm.llm_engine.engine_core.shutdown()
    seen.append(len(close_engine(llm).errors))
    return seen


def test_hooks_are_gone_before_the_shutdown_begins_also_in_the_users_own(lab: Lab, model: Path) -> None:
    assert lab(hooks_at_shutdown, model) == [1, 0, 0]


def failing_step(model: str) -> dict[str, Any]:
    before = tools.private_mib()
    llm = tools.build(model)
    alive = tools.watch(llm)

    def broken() -> None:
        raise OSError("the device went away")

    llm.llm_engine.engine_core.engine_core.model_executor.shutdown = broken
    first = tools.as_data(close_engine(llm))
    again = tools.as_data(close_engine(llm))
    return {"first": first, "again": again, "alive": alive(), "stayed": tools.private_mib() - before}


def test_a_step_that_fails_is_reported_and_the_others_run(lab: Lab, model: Path) -> None:
    seen = lab(failing_step, model)
    assert seen["first"]["errors"] == ["shut its core down: OSError: the device went away"]
    assert seen["first"]["steps"] == STEPS
    assert seen["alive"] == []
    assert seen["stayed"] < NEARLY_ALL_BACK


def closed_twice(model: str) -> dict[str, Any]:
    llm = tools.build(model)
    tools.tokens(llm)
    first = close_engine(llm)
    second = close_engine(llm)
    third = close_engine(llm.llm_engine)
    try:
        llm.generate("once more")
        use = "nothing was raised"
    except Exception as problem:
        use = f"{type(problem).__name__}: {problem}"
    return {"same": first is second is third, "use": use}


def test_closing_twice_does_nothing_and_using_it_says_why(lab: Lab, model: Path) -> None:
    seen = lab(closed_twice, model)
    assert seen["same"]
    assert seen["use"].startswith("EngineClosedError: LLMEngine number ")
    assert "was used after it was closed" in seen["use"]


def adopted(model: str) -> dict[str, Any]:
    llm = tools.build_unseen(model, enforce_eager=False)
    tools.tokens(llm)
    from pytest_vllm_cleanup.engines.registry import registry

    seen = len(list(registry.handles()))
    alive, before, live = tools.watch(llm), tools.hooks(), tools.private_mib()
    report = close_engine(llm)
    return {
        "seen": seen,
        "hooks": [before, tools.hooks()],
        "alive": alive(),
        "errors": report.errors,
        "back": live - tools.private_mib(),
    }


def test_an_engine_built_before_anybody_watched_is_freed(fresh_lab: Lab, model: Path) -> None:
    seen = fresh_lab(adopted, model)
    assert seen["seen"] == 0
    assert seen["hooks"] == [1, 0]
    assert seen["alive"] == []
    assert seen["errors"] == []
    assert seen["back"] > tools.KV_MIB - NEARLY_ALL_BACK


def not_an_engine() -> str:
    try:
        close_engine(object())
    except TypeError as problem:
        return str(problem)
    return ""


def test_what_is_no_engine_is_refused(lab: Lab) -> None:
    assert lab(not_an_engine) == "close_engine() takes an LLM, LLMEngine or AsyncLLM of vLLM, not builtins.object"


# --- what the caller still holds ---


class Owner:
    """Stands for a test class or fixture object with an engine."""


def in_a_cycle(model: str, closed: bool) -> dict[str, Any]:
    before = tools.private_mib()
    llm = tools.build(model, enforce_eager=closed)
    owner = Owner()
    owner.llm, owner.me, llm.owner = llm, owner, owner  # type: ignore[attr-defined]
    alive = tools.watch(llm)
    if closed:
        close_engine(llm)
    del llm, owner
    if not closed:
        gc.unfreeze()
        gc.collect()
        release_unreleased()
    return {"alive": alive(), "hooks": tools.hooks(), "stayed": tools.private_mib() - before}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_an_engine_in_a_reference_cycle_is_freed(lab: Lab, model: Path, closed: bool) -> None:
    seen = lab(in_a_cycle, model, closed)
    assert seen["alive"] == []
    assert seen["hooks"] == 0
    assert seen["stayed"] < NEARLY_ALL_BACK


def _held(llm: Any, what: str) -> Any:
    runner = tools.runner_of(llm)
    if what == "attention layer":
        return next(iter(runner.compilation_config.static_forward_context.values()))
    if what == "forward context":
        return runner.compilation_config.static_forward_context
    return {
        "LLM": llm,
        "LLMEngine": llm.llm_engine,
        "generate": llm.generate,
        "vllm_config": llm.llm_engine.vllm_config,
        "core": tools.core_of(llm),
        "model runner": runner,
        "kv_caches": runner.kv_caches,
        "renderer": llm.llm_engine.renderer,
        "parameter": next(runner.model.parameters()),
    }[what]


def kept(model: str, what: list[str]) -> dict[str, Any]:
    before = tools.private_mib()
    llm = tools.build(model)
    tools.tokens(llm)
    things = [_held(llm, each) for each in what]
    alive, taken = tools.watch(llm), tools.private_mib() - before
    report = close_engine(llm)
    del llm
    gc.collect()
    seen = {"alive": alive(), "reported": report.alive, "taken": taken, "stayed": tools.private_mib() - before}
    if what == ["parameter"]:
        seen["usable"] = bool((things[0] * 0 == 0).all())
    return seen


@pytest.mark.parametrize(
    ("what", "alive"),
    [
        (["LLM", "LLMEngine", "generate", "vllm_config", "renderer", "kv_caches", "forward context"], []),
        (["core", "model runner"], ["core", "runner"]),
        (["attention layer"], []),
        (["parameter"], ["parameter"]),
    ],
    ids=["shells", "core and runner", "attention layer", "parameter"],
)
def test_what_the_caller_still_holds_keeps_no_memory(lab: Lab, model: Path, what: list[str], alive: list[str]) -> None:
    seen = lab(kept, model, what)
    assert seen["alive"] == alive
    assert seen["reported"] == [name for name in shells.HEAVY if name in alive]
    assert seen["taken"] > tools.KV_MIB
    assert seen["stayed"] < NEARLY_ALL_BACK
    assert seen.get("usable", True)


def exception_from_generate(model: str, inside_model: bool) -> dict[str, Any]:
    before = tools.private_mib()
    llm = tools.build(model)
    runner = tools.runner_of(llm)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the step")

    if inside_model:
        runner.model.model.layers[0].mlp.forward = broken
    else:
        runner.execute_model = broken
    alive, held = tools.watch(llm), None
    del runner
    try:
        tools.tokens(llm)
    except ZeroDivisionError as problem:
        held = problem
    report = close_engine(llm)
    seen = {
        "alive": alive(),
        "reported": report.alive,
        "stayed": tools.private_mib() - before,
        "text": str(held),
    }
    del held
    gc.collect()
    return {**seen, "later": alive()}


def test_an_exception_from_generate_that_is_still_held_keeps_no_memory(lab: Lab, model: Path) -> None:
    seen = lab(exception_from_generate, model, False)
    assert seen["text"] == "in the step"
    assert "model" not in seen["alive"]
    assert "KV cache" not in seen["alive"]
    assert "parameter" not in seen["alive"]
    assert seen["stayed"] < NEARLY_ALL_BACK


def test_an_exception_from_inside_the_model_keeps_no_kv_cache(lab: Lab, model: Path) -> None:
    # Its frames hold the modules as "self", so the weights stay until the exception goes. The report says so.
    seen = lab(exception_from_generate, model, True)
    assert "KV cache" not in seen["alive"]
    assert "model" in seen["reported"]
    assert seen["stayed"] < NEARLY_ALL_BACK
    assert seen["later"] == []


def exception_of_the_caller(model: str) -> dict[str, Any]:
    before = tools.private_mib()

    def test_body() -> None:
        llm = tools.build(model)
        references.append(weakref.ref(llm))
        watched.append(tools.watch(llm))
        raise AssertionError("of the test")

    references: list[Any] = []
    watched: list[Any] = []
    held = None
    try:
        test_body()
    except AssertionError as problem:
        held = problem
    report = close_engine(references[0]())
    assert held is not None
    assert held.__traceback__ is not None
    local = "llm" in held.__traceback__.tb_next.tb_frame.f_locals  # type: ignore[union-attr]
    stayed = tools.private_mib() - before
    return {"local": local, "alive": watched[0](), "errors": report.errors, "stayed": stayed}


def test_a_traceback_with_the_engine_among_its_locals_keeps_no_memory(lab: Lab, model: Path) -> None:
    seen = lab(exception_of_the_caller, model)
    stayed = seen.pop("stayed")
    assert seen == {"local": True, "alive": [], "errors": []}
    assert stayed < NEARLY_ALL_BACK


# --- what the engine changes in the process ---


def process_state(model: str) -> dict[str, Any]:
    import torch

    def look() -> dict[str, Any]:
        return {
            "environ": dict(os.environ),
            "affinity": sorted(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "frozen": gc.get_freeze_count(),
        }

    def bind() -> None:
        # vLLM's CPU platform binds its threads while it starts; whether it does so here depends on the release.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        torch._C.set_num_threads(1)

    torch.set_num_threads(3)
    gc.freeze()
    before = look()
    with _during_profiling(bind):
        llm = tools.build(model)
    live = look()
    os.environ["SET_BY_THE_USER"] = "meanwhile"
    close_engine(llm)
    after = look()
    theirs = os.environ.pop("SET_BY_THE_USER")
    torch.set_num_threads(2)
    return {"before": before, "live": live, "after": after, "theirs": theirs, "set later": torch.get_num_threads()}


@pytest.fixture(scope="module")
def states(lab: Lab, model: Path) -> dict[str, Any]:
    found: dict[str, Any] = lab(process_state, model)
    return found


def test_environment_variables_are_as_before_and_the_users_own_stay(states: dict[str, Any]) -> None:
    environ = {stage: dict(states[stage]["environ"]) for stage in ("before", "live", "after")}
    assert environ["after"].pop("SET_BY_THE_USER") == "meanwhile"
    assert environ["live"] != environ["before"]
    assert environ["after"] == environ["before"]


def test_threads_and_processors_are_as_before(states: dict[str, Any]) -> None:
    assert states["before"]["threads"] == states["after"]["threads"] == 3
    assert states["live"]["threads"] == 1
    assert len(states["live"]["affinity"]) == 1
    assert states["after"]["affinity"] == states["before"]["affinity"]


def test_the_number_of_threads_can_be_set_again(states: dict[str, Any]) -> None:
    assert states["set later"] == 2


def test_what_the_user_froze_is_thawed_as_documented(states: dict[str, Any]) -> None:
    assert states["before"]["frozen"] > 100_000
    assert states["after"]["frozen"] == 0


def users_process_group(model: str, store: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    group = dist.group.WORLD
    for _ in range(2):
        llm = tools.build(model)
        first = tools.tokens(llm)
        report = close_engine(llm)
        assert report.errors == [], report.errors
    alive = dist.is_initialized() and dist.group.WORLD is group
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    llm = tools.build(model)
    second = tools.tokens(llm)
    live = dist.is_initialized()
    close_engine(llm)
    return {"alive": alive, "sum": tensor.item(), "live": live, "after": dist.is_initialized(), "same": first == second}


def test_a_default_process_group_of_the_user_survives_and_the_engines_own_does_not(
    lab: Lab, model: Path, tmp_path: Path
) -> None:
    seen = lab(users_process_group, model, tmp_path / "store")
    assert seen == {"alive": True, "sum": 1.0, "live": True, "after": False, "same": True}


# --- helpers of the scenarios ---


def _wrapper(llm: Any) -> Any:
    return tools.runner_of(llm).model.model


def _as_up_to_0_22(llm: Any) -> None:
    """Make an engine as it was up to release 0.22: no stored handle, no cleanup(), no finalizers."""
    wrapper = _wrapper(llm)
    del wrapper._bytecode_hook_handle
    object.__setattr__(wrapper, "cleanup", None)
    llm.llm_engine._finalizer.detach()
    del llm.llm_engine._finalizer
    llm.llm_engine.engine_core._finalizer.detach()


@contextlib.contextmanager
def _during_profiling(action: Callable[[], object]) -> Iterator[None]:
    """Have something called while an engine is being built."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.determine_available_memory
    CPUWorker.determine_available_memory = tools.preceded(original, action)
    try:
        yield
    finally:
        CPUWorker.determine_available_memory = original
