"""For all tests of this project."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
HERE = Path(__file__).parent
# Their tests share inner runs, or compete for the caches of compiled code.
TOGETHER = ("chaos", "engines", "zoo")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where pytest-xdist spreads the tests (--dist=loadgroup), keep together what belongs together."""
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if HERE in item.path.parents else ""
        if folder in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(folder))
        elif item.get_closest_marker("engine") is not None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
