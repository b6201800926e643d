"""What a fresh process poses as: a worker of pytest-xdist, so that plugins leave files of results to the parent."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_vllm_cleanup.isolation.wire import plain

_ID = "master"  # as pytest-xdist calls a process that is no worker
_HOOK = "pytest_configure_node"


def workerinput(config: pytest.Config) -> dict[str, Any]:
    """Return what such a process has as ``config.workerinput``: that of this process, if it is a worker itself.

    Else this run's plugins are asked, as pytest-xdist asks them for each of its workers: what they put in here they
    read in there.
    """
    own = getattr(config, "workerinput", None)
    return dict(plain(own if own is not None else _filled(config)))


def _filled(config: pytest.Config) -> dict[str, Any]:
    known: dict[str, Any] = {"workerid": _ID, "workercount": 1, "testrunuid": "", "mainargv": [""]}
    # pytest-randomly reads it in every worker, and puts it in only where pytest-xdist is loaded.
    if (seed := config.getoption("randomly_seed", None)) is not None:
        known["randomly_seed"] = seed
    spec = SimpleNamespace(id=_ID, popen=True, chdir=None, env={})
    node = SimpleNamespace(config=config, workerinput=known, gateway=SimpleNamespace(id=_ID, spec=spec))
    manager = config.pluginmanager
    hook = getattr(config.hook, _HOOK, None)  # also without pytest-xdist, where a plugin has it as an optional one
    for implementation in hook.get_hookimpls() if hook is not None else ():
        others = [plugin for plugin in manager.get_plugins() if plugin is not implementation.plugin]
        # One that counts on a run with workers, as that of pytest-cov does, has nothing for this one.
        with suppress(Exception):
            manager.subset_hook_caller(_HOOK, others)(node=node)
    return known
