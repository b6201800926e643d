"""Where a test is, so that another process finds the same one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
