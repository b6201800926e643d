"""Freeing an engine whose model lives in this process, down to the last byte.

Order matters: hooks go before shutdown (after it, releases 0.30 to 0.32 cannot find them any more), references
before the collection, and caches are flushed last. Every step is guarded, timed and idempotent. Nothing here
holds an engine, module, tensor, frame or exception while it collects and measures.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from pytest_vllm_cleanup.engines import environ, hooks, shells, siblings, stop, traces
from pytest_vllm_cleanup.engines.holders import clear_lru_caches_holding, keep_pool_allocators, release_holders
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry

_MAX_COLLECTIONS = 3


def drain(handle: EngineHandle) -> CloseReport:
    """Free one in-process engine: live, dropped, or failed while starting.

    Returns:
        what each step did. Steps that fail are reported there; the next one runs all the same.
    """
    # One that failed to start was taken apart at once, and its shells are empty.
    report = CloseReport() if handle.report is None else handle.report
    with registry.closing(handle, report):
        if handle.report is None:
            take_apart(handle, report)
        _free(handle, report)
    report.alive = [name for name in shells.HEAVY if handle.part(name) is not None]
    registry.closed(handle, report)
    return report


def take_apart(handle: EngineHandle, report: CloseReport) -> None:
    """Do the first half of a drain: hooks, shutdown, and emptying every object between engine and model."""
    run = report.run
    run("release its bytecode hooks", release_hooks, handle)
    run("wake it", _with_parts, handle, shells.wake)
    run("unbind the KV cache", _with_parts, handle, shells.unbind_kv_cache)
    run("keep the allocators of its pools", keep_pool_allocators)
    run("shut its core down", _shut_down, handle)
    run("clear its CUDA graphs", _clear_graphs, handle)
    run("empty its shells", _with_parts, handle, shells.empty)
    stop.end_processes(handle, report)


def _free(handle: EngineHandle, report: CloseReport) -> None:
    run = report.run
    run("part from the engine object", _sever, handle)
    _release_process_state(handle, run)
    run("collect garbage", _collect, handle, report)
    last = not registry.siblings(handle)
    # Only one engine of a process can have sleep mode, so its pools never belong to a sibling.
    run("release memory pools", _release_holders, last or handle.sleeps, True)
    run("flush device caches", _flush, last)


def release_unreleased() -> list[EngineHandle]:
    """Drain the engines that were dropped without being closed or that failed while starting.

    Called at safe moments: before the next engine is built, at teardown, and before a verdict.
    """
    released = registry.unreleased()
    for handle in released:
        if handle.in_process is False and handle.state is State.DROPPED:
            stop.stop(handle)  # its own finalizer has asked its processes to end
        else:
            drain(handle)
    return released


def still_alive(due: list[EngineHandle]) -> tuple[EngineHandle, ...]:
    """Return those engines that are live after everything that only cycles keep alive has been collected.

    Args:
        due: the engines that should be gone. Nothing is collected if there is none.
    """
    if due:
        gc.unfreeze()  # vLLM froze the engine's cycles out of the collector's sight
        gc.collect()
        release_unreleased()
    return tuple(handle for handle in due if handle.state is State.LIVE)


def _with_parts(handle: EngineHandle, action: Callable[[dict[str, Any]], None]) -> None:
    action({name: part for name in handle.parts if (part := handle.part(name)) is not None})


def release_hooks(handle: EngineHandle) -> None:
    """Remove the engine's bytecode hooks. Must precede vLLM's own shutdown, whoever calls it."""
    finalizer = shells.own(handle.part("engine"), "_finalizer")
    try:
        if finalizer is not None:
            finalizer()  # vLLM's own (0.24 on), which until it has run keeps the model in 0.24 and 0.26
    finally:
        _remove_hooks(handle)


def _remove_hooks(handle: EngineHandle) -> None:
    keys = handle.traces.hooks
    config = shells.own(handle.part("engine"), "vllm_config") or shells.own(handle.part("core"), "vllm_config")
    if config is not None:
        keys |= hooks.config_hook_keys(config)
    hooks.remove_hooks(keys)


def _shut_down(handle: EngineHandle) -> None:
    client, core = shells.own(handle.part("engine"), "engine_core"), handle.part("core")
    # Siblings are protected in the wrapper around EngineCore.shutdown, so that a user's own call is safe too.
    if client is not None:
        with stop.limited(handle):  # its workers may be processes all the same
            client.shutdown()
    elif shells.own(core, "scheduler") is not None:
        core.shutdown()  # type: ignore[union-attr]  # the engine object is gone already
    elif (executor := handle.part("executor")) is not None:
        # The constructor failed. A core that is half built cannot be shut down: it misses what it ends first.
        with siblings.during_shutdown(handle):
            executor.shutdown()


def _clear_graphs(handle: EngineHandle) -> None:
    for group in handle.graph_wrappers:
        for wrapper in list(group):
            wrapper.clear_graphs()


def _sever(handle: EngineHandle) -> None:
    engine = handle.part("engine")
    renderer = shells.own(engine, "renderer")
    shells.sever(engine, str(handle))
    if hasattr(renderer, "shutdown"):
        renderer.shutdown()  # its thread pool; LLMEngine has nothing that ends it (0.18 to 0.29)


def _release_process_state(handle: EngineHandle, run: Callable[..., None]) -> None:
    last = not registry.siblings(handle)
    compiled = handle.traces.compiled | (traces.compiled_globals() if last else frozenset())
    run("delete compiled functions from model modules", traces.delete_compiled_globals, compiled)
    # Before the process groups, which workspaces and connectors still use to say goodbye.
    run("release vLLM's process-wide holders", _release_holders, last, False)
    if last:
        run("clear LRU caches that hold tensors", clear_lru_caches_holding)
        run("reset Dynamo", _reset_dynamo)
        run("destroy process groups", _destroy_groups, handle)
        run("restore threads", traces.restore_threads, handle.traces)
    run("give back environment variables", environ.give_back, handle)


def _release_holders(last: bool, collected: bool) -> None:
    released = release_holders(last_engine=last, collected=collected)
    errors = [f"{item.name}: {item.error}" for item in released if item.error is not None]
    if errors:
        raise RuntimeError("; ".join(errors))


def _reset_dynamo() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _destroy_groups(handle: EngineHandle) -> None:
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None:
        with siblings.during_shutdown(handle):
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _collect(handle: EngineHandle, report: CloseReport) -> None:
    # vLLM freezes the heap at the end of start-up, which hides the engine's reference cycles from the collector.
    # What the user had frozen thaws too: Python offers no way to tell the two apart.
    gc.unfreeze()
    while report.collections < _MAX_COLLECTIONS:
        gc.collect()
        report.collections += 1
        if all(handle.part(name) is None for name in shells.HEAVY):
            return


def _flush(last: bool) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    if last:
        # Graphs of a live sibling may have captured the address of a workspace.
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    flush_host = getattr(torch._C, "_host_emptyCache", None)
    if flush_host is not None:
        flush_host()
