"""What building an engine leaves in the process, known by difference: a look before and a look after.

Only integers, strings and process ids are kept, never an object of the engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeAlias

from pytest_vllm_cleanup.engines import hooks

_COMPILED_PREFIX = "__compiled_fn_"

Written: TypeAlias = dict[str, tuple[str | None, str | None]]
"""Environment variables, each with the value before (None: unset) and the value written."""


@dataclass(frozen=True)
class Before:
    """The process as it was just before an engine is built."""

    hooks: frozenset[int]
    compiled: frozenset[tuple[str, str]]
    environ: dict[str, str]
    process_group: bool
    affinity: frozenset[int]
    threads: int | None


@dataclass
class Traces:
    """What an engine added to the process while it was built.

    Attributes:
        hooks: keys of its bytecode hooks.
        compiled: (module, name) of the ``__compiled_fn_*`` globals that Dynamo put into model modules.
        environ: variables that it wrote.
        user_process_group: a default process group existed already, so it is not the engine's to destroy.
        affinity: processors this process could run on before (vLLM's CPU platform binds its threads).
        threads: torch's thread count before, None if torch was not imported.
    """

    hooks: frozenset[int] = frozenset()
    compiled: frozenset[tuple[str, str]] = frozenset()
    environ: Written = field(default_factory=dict)
    user_process_group: bool = False
    affinity: frozenset[int] = frozenset()
    threads: int | None = None

    def inherit(self, first: Traces) -> None:
        """Take over what only the first engine of several could see: the process before any engine."""
        self.user_process_group = first.user_process_group
        self.affinity = first.affinity
        self.threads = first.threads


def look(environ: dict[str, str] | None = None) -> Before:
    """Record the state of this process before an engine is built. Imports nothing.

    Args:
        environ: the environment before the engine's configuration was made, which writes variables too.
    """
    return Before(
        hooks=hooks.hook_keys(),
        compiled=compiled_globals(),
        environ=dict(os.environ) if environ is None else environ,
        process_group=_process_group_exists(),
        affinity=_affinity(),
        threads=_threads(),
    )


def difference(before: Before) -> Traces:
    """Return what has been added since ``before``."""
    now = dict(os.environ)
    return Traces(
        hooks=hooks.engine_hook_keys(hooks.hook_keys() - before.hooks),
        compiled=compiled_globals() - before.compiled,
        environ={
            name: (before.environ.get(name), now.get(name))
            for name in before.environ.keys() | now.keys()
            if before.environ.get(name) != now.get(name)
        },
        user_process_group=before.process_group,
        affinity=before.affinity,
        threads=before.threads,
    )


def compiled_globals() -> frozenset[tuple[str, str]]:
    """Return (module, name) of every function that Dynamo compiled into a global of a vLLM module.

    With ahead-of-time compilation (the default from torch 2.10) ``torch._dynamo.reset()`` leaves them, and on
    CUDA they hold the captured graphs.
    """
    return frozenset(
        (module.__name__, name)
        for module in _vllm_modules()
        for name in list(vars(module))
        if name.startswith(_COMPILED_PREFIX)
    )


def delete_compiled_globals(names: frozenset[tuple[str, str]]) -> None:
    """Delete such globals again."""
    for module_name, name in names:
        module = sys.modules.get(module_name)
        if module is not None:
            vars(module).pop(name, None)


def restore_threads(traces: Traces) -> None:
    """Give the process back the processors and the torch thread count it had before the engine."""
    if traces.affinity and traces.affinity != _affinity():
        os.sched_setaffinity(0, traces.affinity)
    torch = sys.modules.get("torch")
    if torch is None or traces.threads is None:
        return
    if torch.set_num_threads.__module__.startswith("vllm."):
        # vLLM's CPU platform switches it off for the whole process.
        vars(torch)["set_num_threads"] = torch._C.set_num_threads
    if traces.threads != torch.get_num_threads():
        torch.set_num_threads(traces.threads)


def _vllm_modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and type(module) is ModuleType:
            yield module


def _process_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _affinity() -> frozenset[int]:
    # Only Linux can tell.
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None or not hasattr(torch, "get_num_threads") else torch.get_num_threads()
