"""Something to be held, and the chains to it."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

from pytest_vllm_cleanup.diagnosis.chains import Chain, find_chains

ROOT = Path(__file__).parents[2]


class Held:
    """Stands for a tensor or an engine: the last one that was made is looked for."""

    last: weakref.ref[Held]

    def __init__(self) -> None:
        Held.last = weakref.ref(self)


def chains(most: int = 3) -> list[Chain]:
    """Return the chains to the last one that was made."""
    return find_chains([Held.last()], deadline=time.monotonic() + 60, most=most, base=str(ROOT))


def chain() -> str:
    """Return the best chain to the last one that was made."""
    return str(chains()[0])
