"""What must be said of a kind. Imports nothing heavy: the outer tests read it too."""

from __future__ import annotations

import os
from dataclasses import dataclass

MIB = 1 << 20
DEVICE = os.environ.get("ZOO_DEVICE", "cpu")
SIZE = (32 if DEVICE == "cuda" else 96) * MIB
"""Bytes that a kind keeps: well above what is let pass, on a GPU and in host memory."""


@dataclass(frozen=True)
class Expect:
    """What must be said of the last test of a module; all tests before it are clean.

    Attributes:
        outcome: of its memory.
        reason: the layer that is named on a GPU; in host memory all is one.
        holder: who must be named in the headline; a star stands for anything.
        says: what must be said somewhere in the diagnosis, line by line, likewise.
        owner: whom it must be charged to, if not to the test, likewise.
        test: what pytest says of the test itself.
        stayed: bytes that leak; None if that is not known beforehand.
        only: where this kind can be had: "cpu", "cuda", "in process", "child processes"; empty for everywhere.
    """

    outcome: str = "leaked"
    reason: str = "allocator"
    holder: str = ""
    says: tuple[str, ...] = ()
    owner: str = ""
    test: str = "passed"
    stayed: int | None = SIZE
    only: str = ""


CLEAN = Expect(outcome="released", reason="", stayed=None)
