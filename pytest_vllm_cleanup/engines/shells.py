"""The chain of objects behind an in-process engine, and taking it apart.

engine -> client -> core -> executor -> worker wrapper -> worker -> model runner -> model: the same in all releases
from 0.11 on. Once these shells are empty, whoever still holds one of them (a failed test's traceback, a
global, a mock) holds no device memory.
"""

from __future__ import annotations

import types
import weakref
from contextlib import suppress
from typing import Any

from pytest_vllm_cleanup.engines.errors import EngineClosedError

# A class of vLLM, and the part that its instances are. Most derived names first.
_ROLES = (
    ("GPUModelRunner", "runner"),
    ("WorkerWrapperBase", "wrapper"),
    ("WorkerBase", "worker"),
    ("Executor", "executor"),
    ("EngineCore", "core"),
)
_DOWN = (
    ("core", "model_executor", "executor"),
    ("executor", "driver_worker", "wrapper"),
    ("wrapper", "worker", "worker"),
    ("worker", "model_runner", "runner"),
)
# Gone when these are gone: they, not the shell that a caller may rightly hold, decide about another collection.
HEAVY = ("core", "runner", "model", "draft model")


def own(thing: Any, name: str) -> Any:
    """Return an attribute of the instance itself, None if absent; evaluates no property and no ``__getattr__``."""
    return getattr(thing, "__dict__", {}).get(name)


def core_of(engine: Any) -> Any | None:
    """Return the engine core in this process, None if it lives in a child process (or is closed)."""
    return own(own(engine, "engine_core"), "engine_core")


def chain(core: Any) -> dict[str, Any]:
    """Return core, executor, wrapper, worker, runner, model and draft model as far as they exist."""
    return _complete({"core": core})


def chain_in_traceback(traceback: types.TracebackType | None) -> dict[str, Any]:
    """Return the parts of an engine whose constructor raised, found as ``self`` in the frames of the traceback."""
    parts: dict[str, Any] = {}
    while traceback is not None:
        candidate = traceback.tb_frame.f_locals.get("self")
        for base in type(candidate).__mro__:
            role = dict(_ROLES).get(base.__name__) if base.__module__.startswith("vllm.") else None
            if role is not None:
                parts.setdefault(role, candidate)
        traceback = traceback.tb_next
    return _complete(parts)


def _complete(parts: dict[str, Any]) -> dict[str, Any]:
    for upper, attribute, lower in _DOWN:
        if lower not in parts and (found := own(parts.get(upper), attribute)) is not None:
            parts[lower] = found
    runner = parts.get("runner")
    if (model := _unwrapped(own(runner, "model"))) is not None:
        parts["model"] = model
    for name in ("drafter", "speculator"):
        if (model := _unwrapped(own(own(runner, name), "model"))) is not None:
            parts["draft model"] = model
    return parts


def _unwrapped(model: Any) -> Any:
    # A CUDA graph or micro-batch wrapper stands in front of the module; it forwards unknown attributes.
    unwrap = getattr(type(model), "unwrap", None)
    if unwrap is not None:
        return unwrap(model)
    return own(model, "runnable") or model


def weak(parts: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
    """Return weak references to the parts."""
    references = {}
    for name, part in parts.items():
        with suppress(TypeError):
            references[name] = weakref.ref(part)
    return references


def wake(parts: dict[str, Any]) -> None:
    """Wake a sleeping engine: memory that is unmapped cannot be returned to its pool."""
    executor = parts.get("executor")
    if own(executor, "is_sleeping"):
        executor.wake_up(None)  # type: ignore[union-attr]


def unbind_kv_cache(parts: dict[str, Any]) -> None:
    """Take the KV cache from every layer that is bound to it, and from the configuration that lists the layers."""
    runner = parts.get("runner")
    compilation = own(runner, "compilation_config")
    context = own(compilation, "static_forward_context")
    if not isinstance(context, dict):
        return
    for layer in context.values():
        cache = own(layer, "kv_cache")
        if isinstance(cache, list):
            cache.clear()
        elif cache is not None:
            # A slice of a tensor would keep its storage: an empty one of the same kind does not.
            layer.kv_cache = cache.new_empty(0) if hasattr(cache, "new_empty") else []


def empty(parts: dict[str, Any]) -> None:
    """Empty the shells of a core that is shut down, so that none of them holds a tensor."""
    compilation = own(parts.get("runner"), "compilation_config")
    for name in ("static_forward_context", "static_all_moe_layers"):
        container = own(compilation, name)
        if container is not None:
            container.clear()
    caches = own(parts.get("runner"), "kv_caches")
    if isinstance(caches, (list, dict)):
        caches.clear()
    for name in ("runner", "worker", "executor", "core"):
        getattr(parts.get(name), "__dict__", {}).clear()
    if (wrapper := parts.get("wrapper")) is not None:
        wrapper.worker = None  # its __getattr__ forwards to the worker and would recurse without one


class ClosedCore:
    """Stands where an engine's core was, and says so to whoever uses the engine after it was closed."""

    def __init__(self, who: str) -> None:
        self._who = who

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the engine is closed already. ``AsyncLLM`` calls this once more when it is collected."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EngineClosedError(
            f"{self._who} was used after it was closed. Its memory has been given back; "
            "build a new engine, or give the fixture that makes it a wider scope."
        )


def sever(engine: Any, who: str) -> None:
    """Part the engine object from all that was behind it. Using it from now on raises ``EngineClosedError``."""
    attributes = getattr(engine, "__dict__", {})
    attributes.pop("model_executor", None)
    attributes["engine_core"] = ClosedCore(who)
