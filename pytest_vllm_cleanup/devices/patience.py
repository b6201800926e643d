"""Waiting for other processes has no limit; when it gets long, it is said once for whom."""

from __future__ import annotations

import sys

LONG = 30.0
"""Seconds after which a wait is worth a word."""


def say(text: str) -> None:
    """Write a line to stderr."""
    print(f"pytest-vllm-cleanup: {text}", file=sys.stderr, flush=True)
