"""Big objects of another process, copied straight out of its memory: process_vm_readv(2).

That is one copy, by several threads at once. The other process must have its objects in place meanwhile, and say where
they are; it is not stopped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeAlias

from pytest_vllm_cleanup.isolation import storages

Piece: TypeAlias = bytes | bytearray | memoryview
Kind: TypeAlias = Literal["bytes", "bytearray", "memory", "storage"]

_PART = 2**24  # bytes that a thread copies before it looks for more
_THREADS = 4  # more are not faster: memory is the limit
_python = ctypes.PyDLL(None)  # ctypes.pythonapi is everybody's, and may have been told of other types
_python.PyByteArray_FromStringAndSize.restype = ctypes.py_object


class Place(NamedTuple):
    """Where a process has a piece.

    Attributes:
        address: of its first byte, in that process.
        size: bytes.
        kind: what it is, there and here: "memory" is what an array or the like is made of, "storage" torch's tensors.
    """

    address: int
    size: int
    kind: Kind


class Part(NamedTuple):
    """Bytes that are copied at once: of which piece, from where in it, how many."""

    piece: int
    start: int
    size: int


def locate(pieces: Iterable[Piece]) -> list[Place]:
    """Return where pieces of this process are, as long as they live and keep their size."""
    return [Place(*_extent(piece), _kind(piece)) for piece in pieces]


def read(pid: int, places: Sequence[Place]) -> list[Piece]:
    """Copy pieces of another process. Memory can be written to here, and is this process's own.

    Args:
        pid: the process.
        places: where it has them.

    Raises:
        OSError: the system does not allow it (EPERM, ENOSYS), the process has ended (ESRCH), or the memory is not of
            the usual kind, but a driver's (EFAULT).
        MemoryError: there is no memory.
        RuntimeError: no thread can be started.
    """
    pieces = [new(place) for place in places]
    parts = list(split([place.size for place in places], _PART))

    def copy(part: Part) -> None:  # it refers to the pieces: their memory is there until the last thread is done
        target = _extent(pieces[part.piece])[0] + part.start
        _read_memory(pid, places[part.piece].address + part.start, target, part.size)

    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(copy, parts):
            pass
    return pieces


def split(sizes: Iterable[int], most: int) -> Iterator[Part]:
    """Yield all bytes of pieces of these sizes in parts of so many bytes at most."""
    for piece, size in enumerate(sizes):
        for start in range(0, size, most):
            yield Part(piece, start, min(most, size - start))


def new(place: Place) -> Piece:
    """Return a piece of the same kind and size, to be filled. Raises ``MemoryError``."""
    if place.kind == "bytes":
        return bytes(place.size)  # may be filled, since nobody has seen it, nor its hash, before
    if place.kind == "bytearray":
        array: bytearray = _python.PyByteArray_FromStringAndSize(None, ctypes.c_ssize_t(place.size))  # without zeros
        return array
    if place.kind == "storage" and (storage := storages.empty(place.size)) is not None:
        return storage
    # Whole pages, so that an array is aligned; private, so that a fork does not see what is written to it.
    try:
        return memoryview(mmap.mmap(-1, place.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as problem:
        raise MemoryError(str(problem)) from None


def window(piece: Piece) -> memoryview:
    """Return the memory of a new piece, to fill it, also if it is bytes. It is there as long as the piece lives."""
    address, size = _extent(piece)
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _kind(piece: Piece) -> Kind:
    if isinstance(piece, memoryview):
        return "storage" if storages.is_storage(piece) else "memory"
    return "bytearray" if isinstance(piece, bytearray) else "bytes"


def _read_memory(pid: int, source: int, target: int, size: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.argtypes = (ctypes.c_int, _POINTER, ctypes.c_ulong, _POINTER, ctypes.c_ulong, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    while size > 0:
        here, there = _Extent(target, size), _Extent(source, size)
        done = function(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)  # meanwhile other threads run
        if done <= 0:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
        source, target, size = source + done, target + done, size - done


def _extent(piece: Piece) -> tuple[int, int]:
    """Return the address and the size of a piece. What ctypes has for that refuses memory that is read-only."""
    view = _View()
    _python.PyObject_GetBuffer(ctypes.py_object(piece), ctypes.byref(view), 0)  # raises what it has to say
    try:
        return view.address or 0, view.size
    finally:
        _python.PyBuffer_Release(ctypes.byref(view))


class _Extent(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_POINTER = ctypes.POINTER(_Extent)


class _View(ctypes.Structure):
    """``Py_buffer``, as the stable interface of Python has it."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
