"""Dynamo's bytecode hooks: which ones belong to an engine, and how they are removed.

vLLM's ``TorchCompileWithNoGuardsWrapper`` registers its bound method ``bytecode_hook`` in a table of the
process (``torch._dynamo.convert_frame._bytecode_hooks``). That table then keeps the compiled module, and
with it weights and KV cache, alive. Neither ``torch._dynamo.reset()`` nor ``del`` empties it. Releases up
to 0.22 throw the handle away, so there only the table itself helps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

_CONVERT_FRAME = "torch._dynamo.convert_frame"
_WRAPPER_MODULE = "vllm.compilation.wrapper"


def _table() -> MutableMapping[int, Callable[..., Any]]:
    module = sys.modules.get(_CONVERT_FRAME)
    return getattr(module, "_bytecode_hooks", {}) if module is not None else {}


def hook_keys() -> frozenset[int]:
    """Return the keys of all hooks that are registered in this process now."""
    return frozenset(_table())


def is_compile_wrapper(owner: object) -> bool:
    """Return whether an object is one of vLLM's compiled modules, whatever its release calls the class."""
    return any(base.__module__ == _WRAPPER_MODULE for base in type(owner).__mro__)


def engine_hook_keys(keys: Collection[int]) -> frozenset[int]:
    """Return those of ``keys`` whose hook is bound to a compiled module of vLLM, not to a user's object."""
    table = _table()
    return frozenset(key for key in keys if is_compile_wrapper(getattr(table.get(key), "__self__", None)))


def config_hook_keys(config: object) -> frozenset[int]:
    """Return the hooks of compiled modules built from one ``VllmConfig``, also those compiled lazily later."""
    return frozenset(
        key
        for key, hook in list(_table().items())
        if is_compile_wrapper(owner := getattr(hook, "__self__", None)) and vars(owner).get("vllm_config") is config
    )


def remove_hooks(keys: Collection[int]) -> int:
    """Remove the hooks with these keys and return how many were there.

    The wrapper's own ``cleanup()`` goes first (releases from 0.24 store the handle); the table entry is deleted
    where the release kept no handle. A key whose hook belongs to somebody else is left alone.
    """
    ours = engine_hook_keys(keys)
    try:
        for key in ours:
            _clean_up(key)
    finally:
        for key in ours:
            _table().pop(key, None)
    return len(ours)


def _clean_up(key: int) -> None:
    # A function of its own, so that no loop variable keeps a bound method, and through it a model, alive.
    cleanup = getattr(getattr(_table().get(key), "__self__", None), "cleanup", None)
    if callable(cleanup):
        cleanup()
