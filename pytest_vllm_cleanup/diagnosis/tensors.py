"""Live tensors of this process, found in Python's heap and told apart by their storage.

Whatever is found belongs to the user: no method of theirs is run, no `__torch_function__` and no `__torch_dispatch__`,
and what is returned is text and numbers. Nothing here starts CUDA or imports torch.

One walk costs 100 ms for a million live objects, and some microseconds for each tensor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pytest_vllm_cleanup.diagnosis import allocations, heap
from pytest_vllm_cleanup.diagnosis.allocations import Books, Pool
from pytest_vllm_cleanup.memory.meters.torch_allocator import initialised_torch
from pytest_vllm_cleanup.memory.reading import HOST

_clock = time.monotonic  # a test may have stopped it
_EVERY = 1000  # tensors between two looks at the clock

# What a class says of itself, not what its metaclass makes of the question.
_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_members_of: Callable[[type], Collection[str]] = type.__dict__["__dict__"].__get__


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """Memory that at least one Python object refers to.

    Attributes:
        device: torch's name of where it is: ``"cuda:0"``, ``"cpu"``.
        address: where it begins.
        bytes: its size.
        shape: of the biggest tensor on it; empty where that cannot be had, as for a storage without a tensor.
        dtype: of that tensor, such as ``"float16"``; "" where there is none.
        kind: class name of that tensor: ``"Tensor"``, ``"Parameter"``; "" where there is none.
        tensors: how many Python tensors share it.
        identity: address of torch's own record of it, which is not given away while the storage lives.
    """

    device: str
    address: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    tensors: int
    identity: int

    def __str__(self) -> str:
        if not self.tensors:
            return "storage without a tensor"
        kind = "tensor" if self.kind == "Tensor" else self.kind
        shape = f" of shape {self.shape}" if self.shape else ""
        views = f" with {self.tensors - 1} more on its memory" if self.tensors > 1 else ""
        return f"{self.dtype} {kind}{shape}{views}"


class Inventory:
    """What is known of live tensors at a baseline, so that older ones are not blamed later.

    On a CUDA device these are the blocks that the allocator has given out, read from its own books: some hundred
    microseconds, no walk. On the host, and where an allocator keeps no books, they are the storages that Python knows.
    """

    def __init__(self, devices: Iterable[str], books: Books, storages: dict[int, Any]) -> None:
        self._devices = frozenset(devices)
        self._books = books
        self._storages = storages

    @classmethod
    def take(cls, devices: Iterable[str]) -> Inventory:
        """Look at some devices: ``"cuda:0"``, ``"host"``."""
        names = frozenset("cpu" if device == HOST else device for device in devices)
        books = allocations.read(names)
        storages = {found.identity: _weak(found.storage) for found in _walk(names - books.blocks.keys())}
        return cls(names, books, storages)

    @classmethod
    def of_nothing(cls, devices: Iterable[str]) -> Inventory:
        """Return that of some devices on which nothing was."""
        return cls(devices, Books(), {})

    def new(self, deadline: float | None = None) -> list[LiveStorage]:
        """Return the storages on these devices that live now and were not there before, biggest first.

        Args:
            deadline: the value of ``time.monotonic()`` at which the search ends with what it has.
        """
        books = allocations.read(self._devices)
        found = [live for live in _grouped(_walk(self._devices, deadline)) if not self._is_old(live, books)]
        return sorted(found, key=lambda storage: (-storage.bytes, storage.address))

    def without(self, before: Inventory, after: Inventory) -> Inventory:
        """Return this inventory without what was made between two others: to a search, that is new.

        Args:
            before: taken before the making of it.
            after: taken after that.
        """
        blocks = {
            device: {at: size for at, size in known.items() if not after._has(device, at, size, but=before)}
            for device, known in self._books.blocks.items()
        }
        made = after._storages.keys() - before._storages.keys()
        storages = {identity: weak for identity, weak in self._storages.items() if identity not in made}
        return Inventory(self._devices, replace(self._books, blocks=blocks), storages)

    def _has(self, device: str, address: int, size: int, *, but: Inventory) -> bool:
        mine, theirs = (inventory._books.blocks.get(device, {}).get(address) for inventory in (self, but))
        return mine == size != theirs

    def unreferenced(self, device: str) -> dict[int, int]:
        """Return address and size of the blocks on a CUDA device that are new and that no Python object is on."""
        blocks = allocations.read([device]).blocks.get(device, {})
        known = {found.address for found in _walk(frozenset({device}))}
        before = self._books.blocks.get(device, {})
        return {at: size for at, size in blocks.items() if at not in known and before.get(at) != size}

    def new_pools(self, device: str) -> list[Pool]:
        """Return the private pools on a device that are new or have grown, biggest first, with what they have more."""
        before = {pool.id: pool for pool in self._books.pools if pool.device == device}
        now = [pool for pool in allocations.read([device]).pools if pool.device == device]
        return [more for pool in now if (more := pool.since(before.get(pool.id))).reserved > 0]

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory at the baseline."""
        return self._books.pinned

    def _is_old(self, storage: LiveStorage, books: Books) -> bool:
        reference = self._storages.get(storage.identity)
        if reference is not None and not reference.expired():
            return True
        blocks = books.blocks.get(storage.device)
        if blocks is None:
            return False
        # What is not in the allocator's books is another process's memory, or the host's as the device sees it.
        size = blocks.get(storage.address)
        return size is None or self._books.blocks.get(storage.device, {}).get(storage.address) == size


class StorageWatch:
    """Tells how much of some storages still lives, without keeping any of them.

    Args:
        storages: as ``Inventory.new`` gave them.
    """

    def __init__(self, storages: Collection[LiveStorage]) -> None:
        sizes = {storage.identity: storage.bytes for storage in storages}
        devices = frozenset(storage.device for storage in storages)
        self._watched: dict[int, tuple[Any, int]] = {}
        for found in _walk(devices):
            if found.identity in sizes and found.identity not in self._watched:
                self._watched[found.identity] = (_weak(found.storage), sizes[found.identity])

    def remaining(self) -> int:
        """Return the bytes of those that still live."""
        return sum(size for reference, size in self._watched.values() if not reference.expired())


def tensors_of(storage: LiveStorage) -> list[object]:
    """Return the live Python tensors on a storage; where there is none, the storage objects. The caller empties it."""
    return tensors_on([storage])[0]


def tensors_on(storages: Sequence[LiveStorage]) -> list[list[object]]:
    """Return the same for several storages, in their order, after one walk."""
    things: dict[tuple[str, int], list[object]] = {(storage.device, storage.address): [] for storage in storages}
    for found in _walk(frozenset(storage.device for storage in storages)):
        wanted = things.get((found.device, found.address))
        if wanted is not None:
            wanted.append(found.thing)
    return [things[storage.device, storage.address] for storage in storages]


class _Found(NamedTuple):
    """A live tensor or storage. Only for the moment, since it keeps it alive."""

    thing: Any
    storage: Any
    is_tensor: bool
    device: str
    address: int
    identity: int


@dataclass(slots=True)
class _Group:
    identity: int
    bytes: int
    tensors: int = 0
    size: tuple[int, bool] = (-1, False)
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kind: str = ""

    def add(self, tensor: Any, torch: Any) -> None:
        kind, base = type(tensor), torch._C.TensorBase
        self.tensors += 1
        # Such a class answers for its shape by a method of its own.
        plain = not _has_own_dispatch(kind, torch.Tensor)
        with torch._C.DisableTorchFunctionSubclass():
            elements = base.numel(tensor) if plain else 0
            # Of two as big, the one that says more: a parameter, and not its data.
            size = (elements, kind is not torch.Tensor)
            if size > self.size:
                self.size = size
                self.shape = tuple(base.shape.__get__(tensor)) if plain else ()
                self.dtype = str(base.dtype.__get__(tensor)).removeprefix("torch.")
                self.kind = _name_of(kind)


def _grouped(walk: Iterable[_Found]) -> list[LiveStorage]:
    torch: Any = sys.modules.get("torch")  # where there is none, nothing is found
    groups: dict[tuple[str, int], _Group] = {}
    for found in walk:
        size = torch._C.StorageBase.nbytes(found.storage)
        group = groups.setdefault((found.device, found.address), _Group(found.identity, size))
        group.bytes = max(group.bytes, size)  # two storages can share memory, as by DLPack
        if found.is_tensor:
            try:
                group.add(found.thing, torch)
            except Exception:  # of this one tensor
                continue
    return [
        LiveStorage(device, address, group.bytes, group.shape, group.dtype, group.kind, group.tensors, group.identity)
        for (device, address), group in groups.items()
    ]


def _walk(devices: frozenset[str], deadline: float | None = None) -> Iterator[_Found]:
    """Iterate over the live tensors on some devices that have memory, then over storages that no tensor is on."""
    torch = sys.modules.get("torch")
    if torch is None or not any(map(_is_up, devices)):
        return
    tensor_kinds = {id(kind) for kind in heap.with_subclasses(torch.Tensor)}
    things = heap.instances(tensor_kinds.union(map(id, heap.with_subclasses(torch.UntypedStorage))))
    things.sort(key=lambda thing: id(type(thing)) not in tensor_kinds)
    seen = set()
    for number, thing in enumerate(things):
        if deadline is not None and number % _EVERY == 0 and _clock() > deadline:
            return
        is_tensor = id(type(thing)) in tensor_kinds
        try:
            found = _look(thing, is_tensor, devices, torch)
        except Exception:  # a sparse tensor has no storage of its own, that of a wrapper no data; of this one anyway
            continue
        # torch keeps a Python object of its own for the storage of a tensor, to which nobody refers.
        if found is not None and (is_tensor or found.identity not in seen):
            seen.add(found.identity)
            yield found


def _look(thing: Any, is_tensor: bool, devices: frozenset[str], torch: Any) -> _Found | None:
    base = torch._C.StorageBase
    if is_tensor:
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch._C.TensorBase.untyped_storage(thing)
    else:
        storage = thing
    device = str(base.device.__get__(storage))
    if device not in devices or not base.nbytes(storage):
        return None
    # The address of a tensor's storage, which asking the storage itself would copy where it is copied lazily.
    address = torch._C._data_address(thing) if is_tensor else base.data_ptr(storage)
    return _Found(thing, storage, is_tensor, device, address, base._cdata.__get__(storage)) if address else None


def _has_own_dispatch(kind: type, tensor: type) -> bool:
    for parent in _mro_of(kind):
        if parent is tensor:
            return False
        if "__torch_dispatch__" in _members_of(parent):
            return True
    return True


def _weak(storage: Any) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def _is_up(device: str) -> bool:
    """Whether there can be tensors on a device; torch is imported."""
    return device == "cpu" or initialised_torch() is not None
