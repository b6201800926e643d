"""What a process that is to become a worker finds out about itself, before pytest or anything else is loaded in it."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..processes import proc
from . import driver, inventory
from .offered import VARIABLES


def look() -> dict[str, Any]:
    """Return plain data on this process: its host, its environment, what the driver lists, and whether CUDA is up."""
    found = inventory.take()
    me = proc.identify(os.getpid())
    return {
        "host": host(),
        "pid": os.getpid(),
        "started": 0 if me is None else me.started,
        "environ": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cards": [[card.index, card.uuid, card.model, list(card.instances), card.partitioned] for card in found.cards],
        "reason": found.reason,
        "cuda": cuda_starter(sys.modules) if cuda_is_up(sys.modules) else "",
    }


def host() -> str:
    """Return what tells this machine, or this container of it, from others."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            file = Path(path)
            parts.append(str(file.readlink()) if file.is_symlink() else file.read_text(encoding="ascii").strip())
        except OSError:
            continue
    return "/".join(parts)


def cuda_is_up(modules: Mapping[str, ModuleType]) -> bool:
    """Whether CUDA has been started in this process, so that it reads no variable any more; starts nothing.

    Args:
        modules: the imported modules.
    """
    started = getattr(getattr(modules.get("torch"), "cuda", None), "is_initialized", None)
    if started is not None and started():
        return True
    library = driver.loaded()
    return library is not None and bool(
        library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != driver.NOT_INITIALISED
    )


_STARTERS = ("torch", "cupy", "tensorflow", "jax", "numba", "pycuda", "paddle", "mxnet")


def cuda_starter(modules: Mapping[str, ModuleType]) -> str:
    """Return who has started CUDA as far as the imported modules tell, as a phrase.

    Whoever imports another module has it in its namespace. Modules stand in the order in which their import ended, and
    that of the first importer of a module ends first.

    Args:
        modules: the imported modules.
    """
    loaded = list(modules)
    name = next((name for name in _STARTERS if name in modules), None)
    if name is None:
        return "by something that is not a module known to use it"
    others = (other for other in loaded if other.partition(".")[0] != name)
    importer = next((other for other in others if _has(modules[other], modules[name])), None)
    if importer is None:
        return f"by {name}"
    file = getattr(modules[importer], "__file__", None)
    return f"by {name}, which {importer} imported ({file})" if file else f"by {name}, which {importer} imported"


def _has(module: object, wanted: ModuleType) -> bool:
    return any(value is wanted for value in list(getattr(module, "__dict__", {}).values()))
