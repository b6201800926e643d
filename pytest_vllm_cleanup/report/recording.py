"""torch's record of allocations, written where a user looks for reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vllm_cleanup.diagnosis import allocations


def write(item: pytest.Item) -> str:
    """Write the record next to the JUnit report, else into pytest's cache, and say where it is, in a sentence."""
    report = item.config.getoption("xmlpath", None)
    if report:
        folder = Path(report).absolute().parent
    elif (cache := getattr(item.config, "cache", None)) is not None:
        folder = cache.mkdir("vllm-cleanup")
    else:
        folder = item.config.rootpath
    path = allocations.write_snapshot(folder, item.nodeid)
    return f"the record of allocations is in {path}; https://pytorch.org/memory_viz shows it"
