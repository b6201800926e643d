"""A project with folders, whose tests print what they find around them."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def facts(request):
    config = request.config
    option = {name: str(value) for name, value in vars(config.option).items() if name in OPTIONS}
    return {
        "argv": sys.argv[1:],
        "cwd": str(Path.cwd()),
        "environ": {name: os.environ.get(name) for name in ("PYTHONHASHSEED", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")},
        "fixtures": sorted(set(request.fixturenames)),
        "flags": str(sys.flags),
        "hash": hash("text") if "PYTHONHASHSEED" in os.environ else None,
        "ini": {name: str(config.getini(name)) for name in ("empty_parameter_set_mark", "addopts", "xfail_strict")},
        "inipath": str(config.inipath),
        "invocation": (str(config.invocation_params.dir), [str(a) for a in config.invocation_params.args]),
        "logging": logging.getLogger().level,
        "module": request.module.__name__,
        "option": option,
        "path": list(dict.fromkeys(sys.path)),
        "plugins": sorted(name for name, _ in config.pluginmanager.list_name_plugin() if not HIDDEN(name)),
        "rootpath": str(config.rootpath),
        "warnoptions": sys.warnoptions,
    }


OPTIONS = ("importmode", "capture", "verbose", "strict_markers", "confcutdir", "rootdir", "tbstyle", "log_cli_level")


def HIDDEN(name):  # what is registered under a number or for a while, or for one kind of process only
    temporary = ("funcmanage", "lfplugin", "nfplugin", "session", "stepwiseplugin", "logxml", "pastebin")
    return (
        name.isdigit()
        or name.endswith("conftest.py")
        or name.startswith(("vllm_cleanup_", "lf", "terminalreporter"))
        or name in temporary
    )


@pytest.fixture
def show(facts):
    for name, fact in facts.items():
        print(name, json.dumps(fact, sort_keys=True))


def pytest_runtest_call(item):
    print("hook of the root's conftest")
