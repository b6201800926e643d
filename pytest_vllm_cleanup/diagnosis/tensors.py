"""Live tensors of this process, found in Python's heap and told apart by their storage.

Whatever is found belongs to the user: no method of theirs is run, no `__torch_function__` and no `__torch_dispatch__`,
and what is returned is text and numbers. Nothing here starts CUDA or imports torch.

A program may have hundreds of thousands of small tensors: the time of every walk is limited, and only big storages are
followed one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_vllm_cleanup.diagnosis import allocations
from pytest_vllm_cleanup.diagnosis.allocations import Books, Pool
from pytest_vllm_cleanup.diagnosis.known import BIG, MOST_FOLLOWED, Known
from pytest_vllm_cleanup.diagnosis.walk import Found, walk, weak
from pytest_vllm_cleanup.memory.reading import HOST

_MOST_DESCRIBED = 1000

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
        bytes: its size; of one that was there before and has grown, by how much.
        shape: of the biggest tensor on it; empty where that cannot be had, as for a storage without a tensor.
        dtype: of that tensor, such as ``"float16"``; "" where there is none.
        kind: class name of that tensor: ``"Tensor"``, ``"Parameter"``; "" where there is none.
        tensors: how many Python tensors share it.
        identity: address of torch's own record of it, which is not given away while the storage lives.
        before: bytes that it had before.
    """

    device: str
    address: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    tensors: int
    identity: int
    before: int = 0

    def __str__(self) -> str:
        if not self.tensors:
            return "storage without a tensor"
        kind = "tensor" if self.kind in ("Tensor", "") else self.kind
        shape = f" of shape {self.shape}" if self.shape else ""
        views = f" with {self.tensors - 1} more on its memory" if self.tensors > 1 else ""
        return f"{self.dtype} {kind}{shape}{views}{' that has grown' if self.before else ''}".lstrip()


class Inventory:
    """What is known of live tensors at a baseline, so that older ones are not blamed later.

    On a CUDA device these are the blocks that the allocator has given out, read from its own books: some hundred
    microseconds, no walk. On the host, and where an allocator keeps no books, they are the storages that Python knows.
    """

    def __init__(self, devices: Iterable[str], books: Books, known: Known) -> None:
        self._devices = frozenset(devices)
        self._books = books
        self._known = known

    @classmethod
    def take(cls, devices: Iterable[str]) -> Inventory:
        """Look at some devices: ``"cuda:0"``, ``"host"``."""
        names = frozenset(map(_torch_name, devices))
        books = allocations.read(names)
        return cls(names, books, Known.on(names - books.blocks.keys()))

    @classmethod
    def of_nothing(cls, devices: Iterable[str]) -> Inventory:
        """Return that of some devices on which nothing was."""
        return cls(devices, Books(), Known())

    def new(self, deadline: float | None = None) -> list[LiveStorage]:
        """Return the storages on these devices that live now and were not there before, biggest first.

        One that was there and has grown is new by what it has grown. Beyond the first thousand they have no shape and
        dtype.

        Args:
            deadline: the value of ``time.monotonic()`` at which the search ends with what it has.
        """
        books = allocations.read(self._devices)
        groups: dict[tuple[str, int], _Group] = {}
        for found in walk(self._devices, deadline, newest_first=True):
            groups.setdefault((found.device, found.address), _Group(found.identity)).add(found)
        new = []
        for (device, address), group in groups.items():
            if (before := self._size_before(device, address, group, books)) < group.bytes:
                more = group.bytes - before
                new.append(
                    (LiveStorage(device, address, more, (), "", "", group.tensors, group.identity, before), group)
                )
        new.sort(key=lambda pair: -pair[0].bytes)  # of those as big, the newest first
        described = [group.described(storage) for storage, group in new[:_MOST_DESCRIBED]]
        return described + [storage for storage, _ in new[_MOST_DESCRIBED:]]

    def plus(self, made: Inventory) -> Inventory:
        """Return this inventory with what was made meanwhile and is not to blame either."""
        devices = self._books.blocks.keys() | made._books.blocks.keys()
        blocks = {
            device: {**self._books.blocks.get(device, {}), **made._books.blocks.get(device, {})} for device in devices
        }
        pools = _pools_added(self._books.pools, made._books.pools, 1)
        books = Books(blocks, pools, self._books.pinned + made._books.pinned)
        return Inventory(self._devices, books, self._known.joined(made._known))

    def new_on(self, device: str, deadline: float | None = None) -> list[LiveStorage]:
        """Return what ``new`` does, of one device, named as meters do."""
        return [storage for storage in self.new(deadline) if storage.device == _torch_name(device)]

    def without(self, other: Inventory) -> Inventory:
        """Return what this inventory has and another one has not.

        Of a later one without an earlier one, that is what was made between them. To one without such a difference,
        what was made is new.
        """
        blocks = {
            device: {at: size for at, size in known.items() if other._books.blocks.get(device, {}).get(at) != size}
            for device, known in self._books.blocks.items()
        }
        pools = _pools_added(self._books.pools, other._books.pools, -1)
        books = Books(blocks, pools, self._books.pinned - other._books.pinned)
        return Inventory(self._devices, books, self._known.without(other._known))

    def unreferenced(self, device: str) -> dict[int, int]:
        """Return address and size of the blocks on a CUDA device that are new and that no Python object is on."""
        blocks = allocations.read([device]).blocks.get(device, {})
        known = {found.address for found in walk(frozenset({device}))}
        before = self._books.blocks.get(device, {})
        return {at: size for at, size in blocks.items() if at not in known and before.get(at) != size}

    def new_pools(self, device: str) -> list[Pool]:
        """Return the private pools on a device that are new or have grown, biggest first, with what they have more."""
        now = [pool for pool in allocations.read([device]).pools if pool.device == device]
        return [more for more in _pools_added(now, self._books.pools, -1) if more.reserved > 0]

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory at the baseline."""
        return self._books.pinned

    def _size_before(self, device: str, address: int, group: _Group, books: Books) -> int:
        if size := self._known.size_of(group.identity, group.bytes, group.found):
            return size
        blocks = books.blocks.get(device)
        if blocks is None:
            return 0
        # What is not in the allocator's books is another process's memory, or the host's as the device sees it.
        block = blocks.get(address)
        old = block is None or self._books.blocks.get(device, {}).get(address) == block
        return group.bytes if old else 0


class StorageWatch:
    """Tells how much of some storages still lives, without keeping any of them.

    Small ones are left out, and where there are very many, the smaller ones.

    Args:
        storages: as ``Inventory.new`` gave them.
        deadline: the value of ``time.monotonic()`` at which no more of them are looked for.
    """

    def __init__(self, storages: Collection[LiveStorage], deadline: float | None = None) -> None:
        big = sorted((storage for storage in storages if storage.bytes >= BIG), key=lambda storage: -storage.bytes)
        wanted = {storage.identity: storage for storage in big[:MOST_FOLLOWED]}
        self._watched: dict[int, tuple[Any, LiveStorage]] = {}
        for found in walk(frozenset(storage.device for storage in wanted.values()), deadline):
            if found.identity in wanted:
                self._watched[found.identity] = (weak(found.storage), wanted.pop(found.identity))
                if not wanted:
                    break

    def remaining(self) -> int:
        """Return the bytes of those that still live and have not shrunk."""
        return sum(min(size - storage.before, storage.bytes) for storage, size in self._alive())

    def parts(self) -> frozenset[tuple[int, int]]:
        """Return which parts of which storages are still watched: the identity of each, and where the part begins."""
        return frozenset((storage.identity, storage.before) for storage, _ in self._alive())

    def _alive(self) -> Iterator[tuple[LiveStorage, int]]:
        torch: Any = sys.modules.get("torch")
        for reference, storage in self._watched.values():
            now = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # None if it is gone
            size = 0 if now is None else torch._C.StorageBase.nbytes(now)
            if size > storage.before:
                yield storage, size


def tensors_on(storages: Sequence[LiveStorage], deadline: float | None = None) -> list[list[object]]:
    """Return the live Python tensors on some storages, in their order; where there is none, the storage objects.

    One walk serves all of them. The caller empties the lists.

    Args:
        storages: as ``Inventory.new`` gave them.
        deadline: the value of ``time.monotonic()`` at which the walk ends with what it has.
    """
    things: dict[tuple[str, int], list[object]] = {(storage.device, storage.address): [] for storage in storages}
    missing = {(storage.device, storage.address): storage.tensors for storage in storages}
    for found in walk(frozenset(storage.device for storage in storages), deadline, newest_first=True):
        wanted = things.get((found.device, found.address))
        if wanted is not None:
            wanted.append(found.thing)
            if len(wanted) == missing.get((found.device, found.address)):
                del missing[found.device, found.address]
                if not missing:  # of very many tensors, not all need be looked at
                    break
    return [things[storage.device, storage.address] for storage in storages]


@dataclass(slots=True)
class _Group:
    """What is on one piece of memory. Only for the moment, like ``Found``."""

    identity: int
    bytes: int = 0
    tensors: int = 0
    found: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> None:
        # Two storages can share memory, as by DLPack.
        self.bytes = max(self.bytes, found.bytes)
        self.tensors += found.is_tensor
        self.found.append(found)

    def described(self, storage: LiveStorage) -> LiveStorage:
        """Return a storage with what is known of the biggest tensor on it."""
        torch: Any = sys.modules.get("torch")
        base, biggest = torch._C.TensorBase, (-1, False)
        for found in self.found:
            if not found.is_tensor:
                continue
            kind = type(found.thing)
            # Such a class answers for its shape by a method of its own.
            plain = not _has_own_dispatch(kind, torch.Tensor)
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    elements = base.numel(found.thing) if plain else 0
                    # Of two as big, the one that says more: a parameter, and not its data.
                    size = (elements, kind is not torch.Tensor)
                    if size > biggest:
                        shape = tuple(base.shape.__get__(found.thing)) if plain else ()
                        dtype = str(base.dtype.__get__(found.thing)).removeprefix("torch.")
                        storage = replace(storage, shape=shape, dtype=dtype, kind=_name_of(kind))
                        biggest = size
            except Exception:  # of this one tensor
                continue
        return storage


def _torch_name(device: str) -> str:
    return "cpu" if device == HOST else device


def _pools_added(pools: Iterable[Pool], others: Iterable[Pool], sign: int) -> list[Pool]:
    """Return private pools with what others have more, or with sign -1 less; biggest first."""
    sizes = {(pool.device, pool.id): (pool.reserved, pool.active) for pool in pools}
    for pool in others:
        key = pool.device, pool.id
        if sign > 0 or key in sizes:
            reserved, active = sizes.get(key, (0, 0))
            sizes[key] = reserved + sign * pool.reserved, active + sign * pool.active
    found = [Pool(device, number, *size) for (device, number), size in sizes.items()]
    return sorted(found, key=lambda pool: (-pool.reserved, pool.id))


def _has_own_dispatch(kind: type, tensor: type) -> bool:
    for parent in _mro_of(kind):
        if parent is tensor:
            return False
        if "__torch_dispatch__" in _members_of(parent):
            return True
    return True
