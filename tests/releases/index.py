"""The committed index `symbols.json`: which release has what the holders table and the drain rely on.

Written anew by `python -m tests.releases.index SOURCES` when the table changes or a release is added.

    {"releases": [...],
     "symbols": {module: {attribute: [[first, last], ...]}},   last is null while the newest release has it
     "facts": {release: {fact: value}}}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.engines.holders import HOLDERS, Holder
from pytest_vllm_cleanup.engines.holders.actions import CacheClear, Call, ClosureClear, Fresh

from .facts import read_facts
from .symbols import Symbols, module_symbols

INDEX = Path(__file__).with_name("symbols.json")


def load() -> dict[str, Any]:
    """The committed index."""
    index: dict[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def build(sources: Path) -> dict[str, Any]:
    """The index of all releases in a folder of the layout `<release>/vllm/...`."""
    releases = sorted((path.parent.name for path in sources.glob("*/vllm")), key=version)
    symbols: dict[str, dict[str, Any]] = {}
    for module in sorted({holder.module for holder in HOLDERS}):
        defined = {release: module_symbols(sources / release, module) for release in releases}
        symbols[module] = {
            name: _runs([_defines(defined[release], name, cached) for release in releases], releases)
            for name, cached in sorted(_wanted(module))
        }
    facts = {release: read_facts(sources / release) for release in releases}
    return {"releases": releases, "symbols": symbols, "facts": facts}


def version(release: str) -> tuple[int, ...]:
    """A release as numbers, for sorting."""
    return tuple(int(part) for part in release.split("."))


def helper(holder: Holder) -> str | None:
    """Name of the function or class of the same module that the holder's action uses, if any."""
    if isinstance(holder.release, Call):
        return holder.release.function
    return holder.release.class_name if isinstance(holder.release, Fresh) else None


def _wanted(module: str) -> set[tuple[str, bool]]:
    """Names that the table has in a module, each with whether it must be under a caching decorator."""
    wanted: set[tuple[str, bool]] = set()
    for holder in HOLDERS:
        if holder.module == module:
            wanted.add((holder.attribute, isinstance(holder.release, (CacheClear, ClosureClear))))
            if (name := helper(holder)) is not None:
                wanted.add((name, False))
    return wanted


def _defines(symbols: Symbols | None, name: str, cached: bool) -> bool:
    return symbols is not None and name in (symbols.cached if cached else symbols.names)


def _runs(found: list[bool], releases: list[str]) -> list[list[str | None]]:
    """Unbroken runs of releases, open at the end if the newest release is in the last one."""
    runs: list[list[str | None]] = []
    for here, before, release in zip(found, [False, *found], releases, strict=False):
        if here and before:
            runs[-1][1] = release
        elif here:
            runs.append([release, release])
    if found[-1]:
        runs[-1][1] = None
    return runs


if __name__ == "__main__":
    INDEX.write_text(json.dumps(build(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
