"""How much device memory an engine asks for before it starts, as vLLM's own check of the free memory does."""

from __future__ import annotations

from typing import Any

_CHECKS_FREE_MEMORY = frozenset({"vllm.v1.worker.gpu_worker.Worker"})
"""Workers that refuse to start with less free memory than ``gpu_memory_utilization`` of the device, whatever
``kv_cache_memory_bytes`` says (vLLM 0.11 to 0.33). The CPU worker has a rule for the memory of a NUMA node."""

_EXTERNAL_WEIGHTS = "ipc_cache"
"""Load format of engines that need less, as another process has their weights (vLLM 0.32 on)."""


def shares_of(config: Any) -> dict[str, float]:
    """Return which share of which device an engine has to find free when it starts.

    Args:
        config: its ``VllmConfig``.

    Returns:
        the share, above 0 and at most 1, by the device's name; empty where it cannot be told, such as for platforms
        without that rule, engines over several machines, data parallel ones, and those with a choice of devices.
    """
    parallel = config.parallel_config
    if parallel.worker_cls not in _CHECKS_FREE_MEMORY or parallel.distributed_executor_backend not in ("mp", "uni"):
        return {}
    if parallel.data_parallel_size > 1 or getattr(parallel, "nnodes", 1) > 1:
        return {}
    if getattr(parallel, "assigned_physical_gpu_ids", None) is not None:
        return {}
    if config.load_config.load_format == _EXTERNAL_WEIGHTS:
        return {}
    share = float(config.cache_config.gpu_memory_utilization)
    return {f"cuda:{rank}": share for rank in range(int(parallel.world_size))}
