"""Processes that coverage does not look at: it makes an import of vLLM a third to a half slower."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """Return the environment for a process that runs nothing of ours that others do not run too."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
