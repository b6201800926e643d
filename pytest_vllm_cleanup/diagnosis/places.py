"""Where code is, in the words of a person: the user's files by path, libraries by dotted name."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.diagnosis import safely

OURS = str(Path(__file__).parent.parent) + os.sep
_LIBRARY_PATHS = tuple(
    {
        os.path.realpath(path) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_LIBRARY_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Also where they are checked out below the tests' own folder.
_LIBRARIES = frozenset({"vllm", "torch", "transformers", "pytest", "_pytest", "pluggy", "pytest_vllm_cleanup"})


def is_ours(code: types.CodeType) -> bool:
    """Whether code belongs to this package."""
    return code.co_filename.startswith(OURS)


def is_users(file: object, module: object = "") -> bool:
    """Whether a source file is the user's: below no library, and not of this package.

    Args:
        file: its path.
        module: the dotted name of its module, if known.
    """
    if type(file) is not str or not file or file.startswith("<"):
        return module == "__main__"
    if type(module) is str and module.partition(".")[0] in _LIBRARIES:
        return False
    return not _is_in_library(file)


@functools.lru_cache(maxsize=1024)  # of text alone; the same files are asked for again and again
def _is_in_library(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith((OURS, *_LIBRARY_PATHS)) or any(folder in path for folder in _LIBRARY_FOLDERS)


def shown(file: str, base: str) -> str:
    """Return a path relative to ``base`` if it is inside it, to the folder of its library if it is in one."""
    if file.startswith("<"):
        return file
    path, inside = os.path.realpath(file), os.path.realpath(base) + os.sep
    if path.startswith(inside) and is_users(file):
        return path[len(inside) :]
    for folder in _LIBRARY_FOLDERS:
        if folder in path:
            return path.rpartition(folder)[2]
    for library in sorted(_LIBRARY_PATHS, key=len, reverse=True):
        if path.startswith(library):
            return path[len(library) :]
    return path[len(inside) :] if path.startswith(inside) else file


def line(code: types.CodeType, number: int | None, base: str) -> str:
    """Return ``path:line`` of a piece of code."""
    return f"{shown(code.co_filename, base)}:{number or code.co_firstlineno}"


def function_name(code: types.CodeType) -> str:
    """Return the name of a function; from Python 3.11 on with its class and what it is nested in."""
    return str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]


def module_label(namespace: Mapping[str, Any], base: str) -> tuple[str, bool]:
    """Return what to call a module, and whether it is the user's.

    Args:
        namespace: the module's ``__dict__``.
        base: the folder to which paths are relative.
    """
    name, file = safely.lookup(namespace, "__name__"), safely.lookup(namespace, "__file__")
    name = name if type(name) is str else "a module"
    if is_users(file, name):
        return (shown(file, base) if type(file) is str else name), True
    return name, False


def module_namespace(name: str) -> dict[str, Any]:
    """Return the ``__dict__`` of a loaded module; empty if it is not loaded."""
    module = sys.modules.get(name)
    # type(), not isinstance: a stand-in module may answer `__class__` by importing the real one.
    if module is None or not issubclass(type(module), types.ModuleType):
        return {}
    namespace: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return namespace


def is_users_function(function: Any) -> bool:
    """Whether a callable is defined in the user's code."""
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is functools.partial:
        return is_users_function(function.func)
    if type(function) is types.FunctionType:
        return is_users(function.__code__.co_filename, function.__module__)
    kind = function if issubclass(type(function), type) else type(function)
    module = safely.module_of(kind)
    return is_users(safely.lookup(module_namespace(module), "__file__"), module)
