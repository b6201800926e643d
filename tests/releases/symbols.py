"""What a release of vLLM defines, read from its sources by syntax tree: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CACHING = frozenset({"lru_cache", "cache", "tensor_cache"})


@dataclass(frozen=True)
class Symbols:
    """Names that a module defines; `Class.member` for those of its classes.

    Attributes:
        names: everything that is assigned, declared or defined.
        cached: the functions among them under a caching decorator.
    """

    names: frozenset[str]
    cached: frozenset[str]


def parse(root: Path, module: str) -> ast.Module | None:
    """Syntax tree of a module under a folder that contains `vllm/`, None if there is no such module."""
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"))
    return None


def module_symbols(root: Path, module: str) -> Symbols | None:
    """Names that a module defines, None if there is no such module."""
    tree = parse(root, module)
    if tree is None:
        return None
    names: set[str] = set()
    cached: set[str] = set()
    for prefix, node in _definitions(tree.body):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names.update(prefix + item.id for item in ast.walk(target) if isinstance(item, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(prefix + node.target.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(prefix + node.name)
            if any(_last_name(item) in _CACHING for item in node.decorator_list):
                cached.add(prefix + node.name)
    return Symbols(frozenset(names), frozenset(cached))


def find_function(tree: ast.Module | None, path: str) -> ast.FunctionDef | None:
    """The function or method at a dotted path in a module."""
    if tree is None:
        return None
    for prefix, node in _definitions(tree.body):
        if isinstance(node, ast.FunctionDef) and prefix + node.name == path:
            return node
    return None


def find_class(tree: ast.Module | None, name: str) -> ast.ClassDef | None:
    """The class of a name in a module."""
    if tree is None:
        return None
    for prefix, node in _definitions(tree.body):
        if isinstance(node, ast.ClassDef) and prefix + node.name == name:
            return node
    return None


def mentions(node: ast.AST | None, name: str) -> bool:
    """Whether a name or attribute occurs in a piece of code."""
    return node is not None and any(
        (isinstance(item, ast.Name) and item.id == name) or (isinstance(item, ast.Attribute) and item.attr == name)
        for item in ast.walk(node)
    )


def _definitions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Statements of a module and of its classes, also under if, try and with, but not inside functions."""
    for node in body:
        yield prefix, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, field, ()), prefix)
            for handler in getattr(node, "handlers", ()):
                yield from _definitions(handler.body, prefix)


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
