"""For all tests of this project."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
# Their tests share inner runs.
TOGETHER = ("tests/chaos/", "tests/zoo/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where pytest-xdist spreads the tests by scope, a scope is a file, or a folder whose tests belong together."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            folder = next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)
            return nodeid.partition("::")[0] if folder is None else folder

    return Scheduling(config, log)
