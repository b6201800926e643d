"""GPU memory that is neither a Python tensor nor another process: pools, graphs, communicators, the driver's own.

Each kind is looked at through what torch and vLLM write down themselves; what was never imported is not imported, and
what cannot be asked is passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pytest_vllm_cleanup.diagnosis import allocations, heap
from pytest_vllm_cleanup.diagnosis.allocations import Pool
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory.meters.torch_allocator import initialised_torch
from pytest_vllm_cleanup.memory.reading import Reading
from pytest_vllm_cleanup.memory.units import MIB, format_size

_CUMEM = "vllm.device_allocator.cumem"


def below(device: str, baseline: Reading, after: Reading, inventory: Inventory | None = None) -> list[str]:
    """Return what is known of such memory on a CUDA device, one sentence each.

    Args:
        device: its name.
        baseline: the reading before.
        after: the reading now.
        inventory: what was there before; None: nothing was.
    """
    inventory = Inventory.of_nothing([device]) if inventory is None else inventory
    sentences: list[str] = []
    for look in (_blocks, _pools, _sleep_mode, _pinned):
        with guarded(f"looking below the tensors of {device}"):
            sentences += look(device, inventory)
    with guarded(f"looking below the allocator of {device}"):
        sentences += _driver(device, baseline, after)
    return sentences


def pool_users(pool: Pool) -> list[object]:
    """Return the live CUDA graphs and memory pools in Python that keep a private pool. The caller empties the list."""
    torch = initialised_torch()
    return [] if torch is None else [thing for thing, number in _users(torch) if number == pool.id]


def _users(torch: Any) -> Iterator[tuple[object, tuple[int, int]]]:
    graphs = {id(kind) for kind in heap.with_subclasses(torch._C._CUDAGraph)}
    pools = {id(kind) for kind in heap.with_subclasses(torch._C._MemPool)}
    for thing in heap.instances(graphs | pools):
        try:
            if id(type(thing)) in graphs:
                first, second = torch._C._CUDAGraph.pool(thing)
            else:
                first, second = torch._C._MemPool.id.__get__(thing)
        except Exception:  # nothing was captured
            continue
        yield thing, (first, second)


def _blocks(device: str, inventory: Inventory) -> Iterator[str]:
    blocks = inventory.unreferenced(device)
    if sum(blocks.values()) < MIB:  # a CUDA graph has some bytes for its random numbers
        return
    biggest = max(blocks, key=lambda address: blocks[address])
    stack = allocations.stack_of(biggest, device)
    yield (
        f"{_count(len(blocks), 'block')} of torch's allocator on {device} ({format_size(sum(blocks.values()))}) "
        "without a tensor in Python: held by an autograd graph or other C++ code, or by a process that was sent "
        "tensors by CUDA IPC" + (f"; the biggest was allocated at {' > '.join(stack)}" if stack else "")
    )


def _pools(device: str, inventory: Inventory) -> Iterator[str]:
    pools = inventory.new_pools(device)
    torch = initialised_torch()
    if not pools or torch is None:
        return
    users: dict[tuple[int, int], dict[str, int]] = {}
    for thing, number in _users(torch):
        kind = type.__dict__["__name__"].__get__(type(thing))
        counts = users.setdefault(number, {})
        counts[kind] = counts.get(kind, 0) + 1
    for pool in pools:
        who = " and ".join(_count(number, kind) for kind, number in users.get(pool.id, {}).items())
        yield (
            f"private pool {pool.id} of torch's allocator on {device} keeps {format_size(pool.reserved)}, "
            f"{format_size(max(pool.active, 0))} of it in use, "
            + (f"for {who} in Python" if who else "and no CUDA graph or memory pool in Python has it any more")
        )


def _sleep_mode(device: str, inventory: Inventory) -> Iterator[str]:  # noqa: ARG001 - only one engine can use it
    module = sys.modules.get(_CUMEM)
    allocator = None if module is None else vars(module).get("CuMemAllocator")
    instance = None if allocator is None else vars(allocator).get("instance")
    if instance is None:
        return
    by_tag: dict[str, int] = {}
    for data in list(instance.pointer_to_data.values()):
        if f"cuda:{data.handle[0]}" == device and not getattr(data, "is_asleep", data.cpu_backup_tensor is not None):
            by_tag[data.tag] = by_tag.get(data.tag, 0) + data.handle[1]
    if by_tag:
        tags = ", ".join(f"{format_size(size)} of {tag!r}" for tag, size in sorted(by_tag.items()))
        yield (
            f"the allocator of vLLM's sleep mode (CuMemAllocator) has given out "
            f"{format_size(sum(by_tag.values()))} on {device}: {tags}"
        )


def _pinned(device: str, inventory: Inventory) -> Iterator[str]:  # noqa: ARG001 - it is the host's
    torch = initialised_torch()
    more = 0 if torch is None else allocations.pinned(torch) - inventory.pinned
    if more >= MIB:
        yield f"pinned host memory: {format_size(more)} more in use, which takes nothing of the device"


def _driver(device: str, baseline: Reading, after: Reading) -> Iterator[str]:
    figures = (baseline.own, after.own) if None not in (baseline.own, after.own) else (baseline.used, after.used)
    before, now = figures
    if before is None or now is None:
        return
    allocator = (after.reserved or 0) - (baseline.reserved or 0)
    more = now - before - allocator
    if more < MIB:
        return
    yield (
        f"{format_size(more)} more on {device} are below torch's allocator: "
        + (f"{groups}, " if (groups := _groups()) else "")
        + "kernels and the context of CUDA, or memory that a library took by itself"
    )


def _groups() -> str:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return ""
    names = [backend for backend, _ in distributed._world.pg_map.values() if "nccl" in backend]
    return f"communicators of NCCL ({_count(len(names), 'process group')} alive)" if names else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
