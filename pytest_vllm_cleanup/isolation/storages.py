"""Memory of torch tensors on the host, as buffers: torch's pickling copies it four times, and anew for each view."""

from __future__ import annotations

import ctypes
import pickle
import sys
from contextlib import suppress
from typing import Any, TypeAlias

Seen: TypeAlias = dict[tuple[int, int], Any]
"""Storages by address and size."""

_SMALL = 2**20  # bytes; below, torch's own way is as good


def reduced(thing: Any, seen: Seen) -> tuple[Any, ...] | None:
    """Return how to pickle the memory of a tensor, as ``__reduce__`` would; None to leave it to torch, or whoever.

    Args:
        thing: what a tensor gives a pickler for its memory, a ``torch.TypedStorage`` or ``torch.UntypedStorage``; or
            anything else.
        seen: the storages of the same pickle, to which this one is added: views share their memory.
    """
    torch = sys.modules.get("torch")
    typed, untyped = (getattr(torch, name, None) for name in ("TypedStorage", "UntypedStorage"))
    kind = type(thing)
    if kind is not typed and kind is not untyped:
        return None
    with suppress(RuntimeError):  # of a tensor that has no memory
        memory = thing._untyped_storage if kind is typed else thing
        if memory.device.type != "cpu" or memory.nbytes() == 0 or (kind is typed and memory.nbytes() < _SMALL):
            return None
        first = seen.setdefault((memory.data_ptr(), memory.nbytes()), memory)
        if kind is typed:
            return _typed, (first, thing.dtype)
        if first is not memory:
            return _itself, (first,)
        return _untyped, (pickle.PickleBuffer(_window(memory)),)
    return None


def is_storage(buffer: memoryview) -> bool:
    """Whether a buffer is the memory of a storage."""
    return hasattr(buffer.obj, "memory")


def empty(size: int) -> memoryview | None:
    """Return the memory of a new storage of so many bytes; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    return memoryview(_window(torch.UntypedStorage(size))).cast("B")


def _window(memory: Any) -> Any:
    window = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
    window.memory = memory  # it lives as long as somebody looks at it
    return window


def _untyped(buffer: Any) -> Any:
    if isinstance(buffer, memoryview) and is_storage(buffer):
        return buffer.obj.memory  # type: ignore[attr-defined]
    target = empty(len(buffer))
    assert target is not None, "torch is not installed"
    target[:] = buffer
    return _untyped(target)


def _typed(memory: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _itself(memory: Any) -> Any:
    return memory
