"""An absolute memory budget for an engine, instead of a share of a device whose size the test does not know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.engines.errors import ModelDoesNotFitError
from pytest_vllm_cleanup.memory import HOST, Reading
from pytest_vllm_cleanup.memory.units import format_size

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_MAX_SHARE = 0.99  # vLLM wants gpu_memory_utilization below 1
_CONFLICTS = ("gpu_memory_utilization", "kv_cache_memory_bytes")
_USABLE = 0.9  # of a device that several share, as of one that vLLM has alone; the rest is for contexts


def weight_bytes(model: str | Path, arguments: Mapping[str, Any]) -> int | None:
    """Return the size of a model's weight files in bytes, None if the model is not a folder with weights."""
    folder = Path(model)
    if arguments.get("load_format") == "dummy" or not folder.is_dir():
        return None
    for pattern in _WEIGHTS:
        sizes = [path.stat().st_size for path in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return None


def defaults(arguments: Mapping[str, Any], readings: Iterable[Reading], sharers: int) -> dict[str, Any]:
    """Return what an engine is given where several workers have the same device and the test says nothing.

    Args:
        arguments: what the test says.
        readings: the devices that this process sees.
        sharers: how many workers have them.

    Returns:
        ``max_memory``, this worker's share of the smallest device. ``gpu_memory_utilization`` instead where the test
        sizes the cache by itself, since vLLM wants so much free memory all the same. Nothing where it limits the
        engine otherwise, where no device has a size, and for vLLM's CPU platform.
    """
    readings = list(readings)
    totals = [reading.total for reading in readings if reading.total is not None]
    on_host = any(reading.device == HOST for reading in readings)
    if sharers < 2 or on_host or not {"max_memory", "gpu_memory_utilization"}.isdisjoint(arguments):
        return {}
    if "kv_cache_memory_bytes" in arguments:
        return {"gpu_memory_utilization": _USABLE / sharers}
    return {"max_memory": int(min(totals) * _USABLE / sharers)} if totals else {}


def device_count(arguments: Mapping[str, Any]) -> int:
    """Return how many devices an engine spreads its weights over."""
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def engine_arguments(
    budget: int, model: str | Path, arguments: Mapping[str, Any], readings: list[Reading]
) -> dict[str, Any]:
    """Turn a budget for weights and KV cache into vLLM's own arguments.

    Args:
        budget: bytes on each device.
        model: name or path of the model.
        arguments: what else the engine gets.
        readings: the devices that the engine will use.

    Returns:
        ``gpu_memory_utilization`` for accelerators, ``kv_cache_memory_bytes`` for vLLM's CPU platform.

    Raises:
        ModelDoesNotFitError: the weights exceed the budget, or a device has less than the budget free.
        ValueError: the budget contradicts another argument, or no device can be measured.
    """
    for name in _CONFLICTS:
        if name in arguments:
            raise ValueError(f"max_memory and {name} both limit the engine's memory: give only one of them")
    if not readings:
        raise ValueError("max_memory needs a device whose memory can be measured, and there is none")
    weights = weight_bytes(model, arguments)
    share = None if weights is None else weights // device_count(arguments)
    if share is not None and share >= budget:
        raise ModelDoesNotFitError(
            f"{model}: the weights alone take {format_size(share)} on each device, max_memory is "
            f"{format_size(budget)}. Raise max_memory or use a smaller model."
        )
    for reading in readings:
        _check_free(budget, model, reading)
    if readings[0].device == HOST:
        return {"kv_cache_memory_bytes": budget - (share or 0)}
    smallest = min(reading.total for reading in readings if reading.total is not None)
    return {"gpu_memory_utilization": min(budget / smallest, _MAX_SHARE)}


def _check_free(budget: int, model: str | Path, reading: Reading) -> None:
    free = _free(reading)
    if free is None:
        raise ValueError(f"max_memory: the size of {reading.device} cannot be measured; use gpu_memory_utilization")
    if free >= budget:
        return
    tenants = [
        f"pid {process.pid} ({process.name or 'unknown'}) {format_size(process.bytes)}"
        for process in sorted(reading.processes or (), key=lambda process: process.bytes or 0, reverse=True)
        if process.bytes
    ]
    holders = f" In use by: {', '.join(tenants[:5])}." if tenants else ""
    raise ModelDoesNotFitError(
        f"{model}: max_memory is {format_size(budget)}, but {reading.device} has only {format_size(free)} of "
        f"{format_size(reading.total or 0)} free.{holders} Free some memory or lower max_memory."
    )


def _free(reading: Reading) -> int | None:
    if reading.device == HOST:
        import psutil

        return int(psutil.virtual_memory().available)
    if reading.total is None or reading.used is None:
        return None
    return reading.total - reading.used
