"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [
        textwrap.dedent(text) for name, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if name == language
    ]


def words(pattern: str, *pages: Path) -> set[str]:
    """Return all that a pattern finds in pages, all of them by default."""
    return {found for page in pages or PAGES for found in re.findall(pattern, page.read_text(encoding="utf-8"))}


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its first two rows."""
    section = page.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    table = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    assert table is not None, f"no table below {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]
