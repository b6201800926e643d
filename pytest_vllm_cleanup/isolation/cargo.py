"""Functions, arguments and results on their way between two processes: pickled into files that are memory.

A file takes any size at once, so neither side waits for the other one, and nothing is written to a disk. What is big in
a result is kept out of its file: the caller copies it from one process to the other. Where it must not, big pieces
are written to the file as well.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import cloudpickle

from pytest_vllm_cleanup.isolation import neighbour_memory, storages
from pytest_vllm_cleanup.isolation.importable import is_importable
from pytest_vllm_cleanup.isolation.neighbour_memory import Piece, Place

Names = dict[str, frozenset[str]]
"""Classes and functions of a process: for each module, names in it."""

_BIG = 2**20  # bytes
_LONGEST_HEAD = 9  # bytes: an opcode, and a size
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC of memfd_create(2)
_OUTCOMES = "_pytest.outcomes"
_ON_HOST = ("cpu", "meta")
_BY_NAME = (type, FunctionType)
_lock = threading.RLock()  # what cloudpickle takes by value is a setting of the whole process
_origin: dict[tuple[str, str], Any] = {}


class DeviceTensorError(TypeError):
    """A tensor would make a CUDA context where it is loaded."""


def memory_file() -> IO[bytes]:
    """Return a new file in memory. It is not limited by the size of ``/dev/shm``."""
    return open(_memory_descriptor(), "w+b")


def pack(file: IO[bytes], value: Any) -> Names:
    """Write a value for a fresh process.

    Functions and classes that it cannot import go by value: those of ``__main__`` and notebooks, local ones, and those
    of modules that only this process could import.

    Returns:
        what of this process's own goes by value, and need not come back so.

    Raises:
        Exception: the value cannot be pickled.
    """
    with _lock:
        packer = _Packer(file)
        try:
            packer.dump(value)
        finally:
            packer.restore()
    file.flush()
    return {name: _defined_in(name) for name in ("__main__", *packer.by_value)}


def pack_answer(file: IO[bytes], value: Any, known: Names) -> list[Piece]:
    """Write a value for the process that ``pack`` was called in, without its big pieces.

    Args:
        file: where to.
        value: what to write.
        known: what that process has itself: goes by name, so that it is the same class there.

    Returns:
        its big pieces.

    Raises:
        DeviceTensorError: there is a tensor on a device in it.
        Exception: the value cannot be pickled.
    """
    big: list[Piece] = []
    _AnswerPacker(file, known, big).dump(value)
    file.flush()
    return big


def write_pieces(file: IO[bytes], pieces: Iterable[Piece]) -> list[int]:
    """Write what ``pack_answer`` has left out. Return where each piece begins."""
    starts = []
    for piece in pieces:
        starts.append(file.tell())
        file.write(piece)
    file.flush()
    return starts


def read_pieces(file: IO[bytes], starts: Iterable[int], places: Iterable[Place]) -> list[Piece]:
    """Return the pieces that ``write_pieces`` has written.

    Args:
        file: where they are.
        starts: where each begins.
        places: where the other process had them.

    Raises:
        MemoryError: there is no memory.
    """
    pieces = []
    for start, place in zip(starts, places, strict=True):
        pieces.append(neighbour_memory.new(place))
        file.seek(start)
        file.readinto(neighbour_memory.window(pieces[-1]))  # type: ignore[attr-defined]
    return pieces


def copies(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces for somebody who may write to them; those that nobody can write to as they are."""
    return [piece if memoryview(piece).readonly else bytearray(piece) for piece in pieces]


def unpack(file: IO[bytes], pieces: Sequence[Piece] = ()) -> Any:
    """Read the next value.

    Args:
        file: where from.
        pieces: what ``pack_answer`` returned, or copies.
    """
    return pickle.load(file, buffers=pieces)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=5)
        self.by_value: list[str] = []
        self._importable: dict[str, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is CodeType:  # cloudpickle drops the file, without which a traceback shows no source
            return _with_file, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        if issubclass(kind, ModuleType):
            self._look_at(obj)
        elif issubclass(kind, _BY_NAME):
            module = sys.modules.get(obj.__module__) if isinstance(obj.__module__, str) else None
            if module is not None:
                self._look_at(module)
        return super().reducer_override(obj)

    def restore(self) -> None:
        """Leave the settings of cloudpickle as they were."""
        for name in self.by_value:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def _look_at(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._importable or sys.modules.get(name) is not module:
            return
        self._importable[name] = name == "__main__" or is_importable(module)
        if not self._importable[name] and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(name)


class _AnswerPacker(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: IO[bytes], known: Names, big: list[Piece]) -> None:
        # A method here would have it refer to itself, and all that it has seen would stay until garbage is collected.
        super().__init__(_Stream(file, big), protocol=5, buffer_callback=partial(_goes_in, big))
        self._known = known
        torch = sys.modules.get("torch")
        kinds = (getattr(torch, "Tensor", None), getattr(torch, "UntypedStorage", None))
        self._storages: storages.Seen = {}
        self._tensors = tuple(kind for kind in kinds if kind is not None)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if issubclass(kind, _BY_NAME):
            name = obj.__qualname__
            if name.partition(".")[0] in self._known.get(obj.__module__, ()) and "<locals>" not in name:
                _origin[obj.__module__, name] = obj
                return _there, (obj.__module__, name)
            if getattr(sys.modules.get(_OUTCOMES), name, None) is obj:  # they claim to be Python's own
                return _there, (_OUTCOMES, name)
        elif issubclass(kind, self._tensors) and obj.device.type not in _ON_HOST:
            raise DeviceTensorError(f"there is a tensor on {obj.device} in it")
        elif (way := storages.reduced(obj, self._storages)) is not None:
            return way
        return super().reducer_override(obj)


def _goes_in(big: list[Piece], buffer: pickle.PickleBuffer) -> bool:
    """Keep a big buffer. Return whether it has to go where it is in the value."""
    raw = buffer.raw()
    if raw.nbytes < _BIG:
        return True
    big.append(raw)
    return False


class _Stream:
    """What a pickler writes to: a file that gets everything but big pieces.

    A pickler writes big bytes by themselves, after their opcode and their size. These become the opcode that takes the
    next buffer, whatever that is. The other way, ``persistent_id``, is called for each object, however small.
    """

    def __init__(self, file: IO[bytes], big: list[Piece]) -> None:
        self._file = file
        self._big = big
        self._end = b""  # of what was written last

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        if isinstance(piece, (bytes, bytearray)) and len(piece) >= _BIG and self._end.endswith(head := _head(piece)):
            self._file.seek(-len(head), os.SEEK_CUR)
            self._file.write(pickle.NEXT_BUFFER)
            self._big.append(piece)
            self._end = b""
        else:
            self._file.write(piece)
            self._end = piece[-_LONGEST_HEAD:] if isinstance(piece, bytes) else b""  # what heads are written as


def _head(piece: bytes | bytearray) -> bytes:
    """Return what a pickler writes before a piece that is as long as this one."""
    size = len(piece)
    if isinstance(piece, bytearray):
        return pickle.BYTEARRAY8 + struct.pack("<Q", size)
    return pickle.BINBYTES + struct.pack("<I", size) if size < 2**32 else pickle.BINBYTES8 + struct.pack("<Q", size)


def _with_file(name: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=name)


def _there(module: str, name: str) -> Any:
    """Return a class or function of the process where this is loaded."""
    if (module, name) in _origin:  # here it was written, and is only tried
        return _origin[module, name]
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _defined_in(module: str) -> frozenset[str]:
    def is_its_own(name: str, value: Any) -> bool:
        return issubclass(type(value), _BY_NAME) and (value.__module__, value.__qualname__) == (module, name)

    found = vars(sys.modules[module]) if module in sys.modules else {}
    return frozenset(name for name, value in list(found.items()) if is_its_own(name, value))


def _memory_descriptor() -> int:
    create: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    if create is not None:
        return create("pytest-vllm-cleanup")
    # A Python that was built on a system older than the one it runs on, as those that installers bring are.
    library = ctypes.CDLL(None, use_errno=True)
    descriptor: int = library.memfd_create(b"pytest-vllm-cleanup", _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor
