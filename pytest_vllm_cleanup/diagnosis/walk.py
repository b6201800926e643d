"""Walking over the live tensors in Python's heap.

No method of a user is run. Nothing here starts CUDA or imports torch.

One walk costs 100 ms for a million live objects, and some microseconds for each tensor.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from pytest_vllm_cleanup.diagnosis import heap
from pytest_vllm_cleanup.memory.meters.torch_allocator import initialised_torch

_clock = time.monotonic  # a test may have stopped it
_EVERY = 1000  # tensors between two looks at the clock


class Found(NamedTuple):
    """A live tensor or storage. Only for the moment, since it keeps it alive."""

    thing: Any
    storage: Any
    is_tensor: bool
    device: str
    address: int
    bytes: int
    identity: int


def walk(
    devices: frozenset[str],
    deadline: float | None = None,
    left: array[int] | None = None,
    *,
    newest_first: bool = False,
) -> Iterator[Found]:
    """Iterate over the live tensors on some devices that have memory, then over storages that no tensor is on.

    Args:
        devices: torch's names of them.
        deadline: the value of ``time.monotonic()`` at which to stop.
        left: is given the addresses of the objects that were not reached until then.
        newest_first: whether to begin with the youngest, as far as the collector knows their age.
    """
    torch = sys.modules.get("torch")
    if torch is None or not any(map(_is_up, devices)):
        return
    tensor_kinds = {id(kind) for kind in heap.with_subclasses(torch.Tensor)}
    things = heap.instances(tensor_kinds.union(map(id, heap.with_subclasses(torch.UntypedStorage))))
    if newest_first:
        things.reverse()
    things = [*_gradients(things, torch), *things]
    things.sort(key=lambda thing: id(type(thing)) not in tensor_kinds)
    identity_of = torch._C.StorageBase._cdata.__get__
    names: dict[Any, str] = {}
    seen = set()
    for number, thing in enumerate(things):
        if deadline is not None and number % _EVERY == 0 and _clock() > deadline:
            if left is not None:
                left.extend(map(id, things[number:]))
            return
        is_tensor = id(type(thing)) in tensor_kinds
        try:
            # torch keeps a Python object of its own for the storage of a tensor, to which nobody refers.
            if not is_tensor and identity_of(thing) in seen:
                continue
            found = _look(thing, is_tensor, devices, names, torch)
        except Exception:  # a sparse tensor has no storage of its own, that of a wrapper no data; of this one anyway
            continue
        if found is not None:
            seen.add(found.identity)
            yield found


def _gradients(things: list[Any], torch: Any) -> list[Any]:
    """Return the gradients that only C code knows until somebody asks for them; those of plain tensors."""
    base = torch._C.TensorBase
    needs_one, is_leaf, gradient_of = (getattr(base, name).__get__ for name in ("requires_grad", "is_leaf", "grad"))
    plain = frozenset((id(torch.Tensor), id(torch.nn.Parameter)))
    owners = [thing for thing in things if id(type(thing)) in plain and needs_one(thing) and is_leaf(thing)]
    gradients = [gradient for owner in owners if (gradient := gradient_of(owner)) is not None]
    known = frozenset(map(id, things)) if gradients else frozenset()
    return [gradient for gradient in gradients if id(gradient) not in known]


def _look(thing: Any, is_tensor: bool, devices: frozenset[str], names: dict[Any, str], torch: Any) -> Found | None:
    base = torch._C.StorageBase
    if is_tensor:
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch._C.TensorBase.untyped_storage(thing)
    else:
        storage = thing
    where = base.device.__get__(storage)
    device = names.get(where) or names.setdefault(where, str(where))
    if device not in devices or not (size := base.nbytes(storage)):
        return None
    # The address of a tensor's storage, which asking the storage itself would copy where it is copied lazily.
    address = torch._C._data_address(thing) if is_tensor else base.data_ptr(storage)
    identity = base._cdata.__get__(storage)
    return Found(thing, storage, is_tensor, device, address, size, identity) if address else None


def weak(storage: Any) -> Any:
    """Return torch's weak reference to a storage."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def _is_up(device: str) -> bool:
    """Whether there can be tensors on a device; torch is imported."""
    return device == "cpu" or initialised_torch() is not None
