"""Where a test is, so that another process finds the same one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Address:
    """A test by its file and the names below that: its class, if any, and its own, with its parameters.

    The id is not used: pytest-xdist adds the name of a group to it, and it would have to be parsed.
    """

    path: str
    names: tuple[str, ...]


def address_of(item: pytest.Item) -> Address:
    """Return the address of a test."""
    chain = item.listchain()
    start = next((number for number, node in enumerate(chain) if isinstance(node, pytest.File)), len(chain) - 1)
    return Address(str(item.path), tuple(node.name for node in chain[start:]))


def find(items: Iterable[pytest.Item], address: Address) -> pytest.Item | None:
    """Return the test with an address, None if it is not among these."""
    return next((item for item in items if address_of(item) == address), None)


def collectable(path: str, folder: str) -> str:
    """Return what to tell pytest to collect for a file: the file, or a folder above it.

    In what it is told, pytest takes "[" and "::" for the beginning of a test's name.

    Args:
        path: the file.
        folder: where pytest runs, which what is told may be relative to.
    """
    for above in (path, *map(str, Path(path).parents)):
        for told in (above, os.path.relpath(above, folder)):
            if "[" not in told and "::" not in told:
                return told
    return path
