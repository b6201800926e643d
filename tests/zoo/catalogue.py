"""All kinds, read without running them: their modules import torch and vLLM."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .kinds import zoo_expect
from .kinds.zoo_expect import Expect

KINDS = Path(__file__).with_name("kinds")
ROOT = KINDS.parents[2]
_NAMES = {"MIB": zoo_expect.MIB, "SIZE": zoo_expect.SIZE, "CLEAN": zoo_expect.CLEAN}


@dataclass(frozen=True)
class Kind:
    """One module of ``kinds/``.

    Attributes:
        file: the module.
        about: its docstring.
        expect: what must be said of its last test.
    """

    file: Path
    about: str
    expect: Expect

    @property
    def name(self) -> str:
        """Folder and name of the module."""
        return f"{self.file.parent.name}/{self.file.stem}"


def kinds(*folders: str, places: tuple[str, ...] | None = None) -> tuple[Kind, ...]:
    """Return the kinds of some folders that can be had in certain places; see ``Expect.only``."""
    found = [_read(file) for folder in folders for file in sorted((KINDS / folder).glob("*.py"))]
    return tuple(kind for kind in found if places is None or kind.expect.only in ("", *places))


@cache
def _read(file: Path) -> Kind:
    module = ast.parse(file.read_text(encoding="utf-8"))
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EXPECT":
            return Kind(file, ast.get_docstring(module) or "", _expect(statement.value))
    raise ValueError(f"{file} does not say what to expect")


def _expect(value: ast.expr) -> Expect:
    """Evaluate ``CLEAN``, ``Expect(...)`` or ``replace(CLEAN, ...)``, and nothing else."""
    return eval(  # of our own text
        ast.unparse(value), {"__builtins__": {}, "Expect": Expect, "replace": replace, **_NAMES}
    )
