"""Which modules another interpreter with the same path can import, as this one has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType


def is_importable(module: ModuleType) -> bool:
    """Return whether importing the module's name runs the file that it was made of here.

    Not so for a test module under pytest's ``--import-mode=importlib``, the second of two ``conftest.py``, a plugin
    that a program has loaded from a path, and the like. Of a module without a file this cannot be told, and it counts
    as importable.
    """
    file = getattr(module, "__file__", None)
    name = module.__name__
    if not isinstance(file, str) or name.partition(".")[0] in sys.stdlib_module_names:
        return True
    try:
        spec = _find(name)
    except Exception:  # somebody's finder, which may not like to be asked
        return True
    return spec is not None and spec.origin is not None and _same(spec.origin, file)


def _find(name: str) -> ModuleSpec | None:
    """Find a module as if it had not been imported yet."""
    package = name.rpartition(".")[0]
    folders: Iterable[str] | None = None
    if package:
        above = _find(package)
        if above is None:
            return None
        file = getattr(sys.modules.get(package), "__file__", None)
        if file is not None and file == above.origin:
            folders = sys.modules[package].__path__  # its code may have added to it
        else:
            folders = above.submodule_search_locations
        if folders is None:
            return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, folders)
        if spec is not None:
            return spec
    return None


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
