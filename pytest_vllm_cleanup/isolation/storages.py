"""Memory of torch tensors as a buffer: torch's own pickling of it copies it four times."""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any

_SMALL = 2**20  # bytes; below, torch's own way is as good


def reduced(thing: Any) -> tuple[Any, ...] | None:
    """Return how to pickle the memory of a tensor on the host, as ``__reduce__`` would; None to leave it to torch.

    Args:
        thing: what a tensor gives a pickler for its memory, a ``torch.TypedStorage``; or anything else.
    """
    kind = getattr(sys.modules.get("torch"), "TypedStorage", None)
    if kind is None or type(thing) is not kind:
        return None
    memory = thing._untyped_storage
    if memory.device.type != "cpu" or memory.nbytes() < _SMALL:
        return None
    window = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
    window.memory = memory  # it lives as long as somebody looks at it
    return _storage, (pickle.PickleBuffer(window), thing.dtype)


def _storage(buffer: Any, dtype: Any) -> Any:
    import torch

    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)
