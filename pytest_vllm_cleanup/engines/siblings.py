"""Keeping live engines of the same process whole while another is built or closed.

vLLM's shutdown destroys what all engines of a process share: process groups (from 0.22.1 on), the workspace
manager, the weight offloader, sleep mode's memory pools. And its start-up clears the CUDA graphs of every
engine in the process while it measures how large its own are. The next step of the other engine then fails, and
the one after that spins for ever.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from pytest_vllm_cleanup.engines.registry import EngineHandle, registry

# (module, name) of what a shutdown calls to tear down state of the whole process.
_PROCESS_WIDE_TEARDOWN = (
    ("vllm.v1.engine.core", "cleanup_dist_env_and_memory"),
    ("vllm.v1.worker.workspace", "reset_workspace_manager"),
    ("vllm.v1.worker.gpu.model_runner", "set_offloader"),
    ("vllm.model_executor.offloader.base", "set_offloader"),
)
_GRAPH_WRAPPERS = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper"),
)


@contextmanager
def during_shutdown(handle: EngineHandle | None) -> Iterator[None]:
    """Hold off the teardown of shared state while another engine of this process lives."""
    with ExitStack() as stack:
        stack.enter_context(_quiet_collector())
        stack.enter_context(_user_process_group(handle))
        siblings = registry.siblings(handle)
        if siblings:
            for module, name in _PROCESS_WIDE_TEARDOWN:
                stack.enter_context(_replaced(sys.modules.get(module), name, _do_nothing))
            stack.enter_context(_own_graphs_only(handle))
            if any(sibling.sleeps for sibling in siblings):
                allocator = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
                stack.enter_context(_replaced(allocator, "release_pools", _do_nothing))
        yield


@contextmanager
def during_build(handle: EngineHandle) -> Iterator[None]:
    """Keep the graphs of other engines out of reach of the one that is being built, and learn which are its own."""
    # The first model runner forbids further captures when it has captured its own; the second one never asks for
    # permission, and would die in a process where an engine with the first has lived.
    monitor = sys.modules.get("vllm.compilation.monitor")
    if monitor is not None:
        monitor.set_cudagraph_capturing_enabled(True)
    with _own_graphs_only(handle):
        yield


@contextmanager
def _own_graphs_only(handle: EngineHandle | None) -> Iterator[None]:
    """Let vLLM's "all instances" of a graph wrapper mean the instances of one engine."""
    with ExitStack() as stack:
        known = list(handle.graph_wrappers) if handle is not None else []
        for index, (module, name) in enumerate(_GRAPH_WRAPPERS):
            wrapper = getattr(sys.modules.get(module), name, None)
            everybody = getattr(wrapper, "_all_instances", None)
            if everybody is None:
                # Imported by the build itself: nobody else has graphs, and all that appear are this engine's.
                stack.callback(_adopt_late, handle, index, module, name)
                continue
            own: weakref.WeakSet[Any] = known[index] if index < len(known) else weakref.WeakSet()
            wrapper._all_instances = own  # type: ignore[union-attr]
            stack.callback(_merge, wrapper, everybody, own, handle, index)
        yield


def _merge(
    wrapper: Any, everybody: weakref.WeakSet[Any], own: weakref.WeakSet[Any], handle: EngineHandle | None, index: int
) -> None:
    everybody.update(own)
    wrapper._all_instances = everybody
    _remember(handle, index, own)


def _adopt_late(handle: EngineHandle | None, index: int, module: str, name: str) -> None:
    everybody = getattr(getattr(sys.modules.get(module), name, None), "_all_instances", ())
    _remember(handle, index, weakref.WeakSet(everybody))


def _remember(handle: EngineHandle | None, index: int, own: weakref.WeakSet[Any]) -> None:
    if handle is not None and len(handle.graph_wrappers) <= index:
        handle.graph_wrappers.append(own)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Skip the full collections inside vLLM's own helpers: 0.4 to 0.8 s each, and the drain does the one needed."""
    quiet = SimpleNamespace(**{name: getattr(gc, name) for name in dir(gc) if not name.startswith("_")})
    quiet.collect = _collect_nothing
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") and type(module) is ModuleType and vars(module).get("gc") is gc
    ]
    for module in users:
        vars(module)["gc"] = quiet
    try:
        yield
    finally:
        for module in users:
            vars(module)["gc"] = gc


@contextmanager
def _user_process_group(handle: EngineHandle | None) -> Iterator[None]:
    """Keep the default process group that the user made before the first engine; vLLM would destroy it too."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or handle is None or not handle.traces.user_process_group:
        yield
        return
    destroy = distributed.destroy_process_group

    def destroy_only_named(group: Any = None) -> None:
        if group is not None and group is not distributed.group.WORLD:
            destroy(group)

    with _replaced(distributed, "destroy_process_group", destroy_only_named):
        yield


@contextmanager
def _replaced(holder: Any, name: str, substitute: Any) -> Iterator[None]:
    if holder is None or name not in vars(holder):
        yield
        return
    original = vars(holder)[name]
    setattr(holder, name, substitute)
    try:
        yield
    finally:
        setattr(holder, name, original)


def _collect_nothing(_generation: int = 2) -> int:
    return 0


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for a teardown that has to wait for the last engine of the process."""
