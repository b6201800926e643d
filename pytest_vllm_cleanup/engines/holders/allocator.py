"""Sleep mode's memory pools.

With `enable_sleep_mode`, weights and KV cache live in pools (`torch.cuda.MemPool`) over an allocator of
vLLM's own, `vllm/device_allocator/cumem.py`. Its singleton keeps a pair of pool and allocator object for
each tag (in later releases a list of pairs), because of pytorch/pytorch#146431, and
`torch.cuda.empty_cache()` returns nothing of a pool that is kept. While any memory is mapped, vLLM
refuses the next engine with sleep mode: "CuMem allocator can only be used for one instance per process",
before 0.22 "Sleep mode can only be used ...".

In older releases of PyTorch a pool points to its allocator object without owning it
(pytorch/pytorch#145168): memory that goes back after the allocator object has died aborts the process.
So the pool goes first, then its memory, and the allocator object last. vLLM's own
`CuMemAllocator.release_pools()`, part of its shutdown from 0.25 on, lets both go while the engine's
tensors are alive: `keep_pool_allocators()` before the shutdown makes it safe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_vllm_cleanup.engines.holders.entry import Place

_MODULE = "vllm.device_allocator.cumem"

# Allocator objects whose pools may still return memory. They hold two function pointers, no tensor.
_kept: list[object] = []


class PoolsInUseError(RuntimeError):
    """Memory of sleep mode is still mapped after its pools were released."""


@dataclass(frozen=True)
class ReleasePools:
    """Return sleep mode's pools to the device; the singleton stays and serves the next engine."""

    def holds(self, place: Place) -> bool:
        """Whether a pool, mapped memory or an allocator object is left."""
        instance = place.value
        return instance is not None and bool(instance.allocator_and_pools or instance.pointer_to_data or _kept)

    def run(self, place: Place) -> None:
        """Release pools, memory and allocators, in this order.

        Raises:
            PoolsInUseError: tensors in the pools are still alive. Their memory comes back when they have died
                and the device cache has been emptied once more.
        """
        instance = place.value
        _keep(instance)
        instance.allocator_and_pools.clear()
        # Recent releases of PyTorch return a dying pool's memory by themselves, older ones only here.
        sys.modules["torch"].cuda.empty_cache()
        sizes = [data.handle[1] for data in instance.pointer_to_data.values()]
        if sizes:
            raise PoolsInUseError(
                f"{sum(sizes)} bytes in {len(sizes)} allocations of sleep mode are still mapped, because "
                "tensors of the closed engine are alive. vLLM refuses another engine with sleep mode in this "
                "process until they are gone."
            )
        _kept.clear()


def keep_pool_allocators() -> None:
    """Keep the allocator objects of sleep mode's pools alive until the pools' memory is returned.

    To be called before an engine is shut down in this process.
    """
    module = sys.modules.get(_MODULE)
    allocator = vars(module).get("CuMemAllocator") if module is not None else None
    if allocator is not None and allocator.instance is not None:
        _keep(allocator.instance)


def _keep(instance: Any) -> None:
    known = {id(allocator) for allocator in _kept}
    _kept.extend(allocator for allocator in _allocators(instance) if id(allocator) not in known)


def _allocators(instance: Any) -> Iterator[object]:
    for entry in instance.allocator_and_pools.values():
        pairs = entry if isinstance(entry, list) else [entry]
        yield from (allocator for _, allocator in pairs)
