"""What pytest loads. Imports the standard library and pytest only; everything else waits until a test needs it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from pytest_vllm_cleanup import config as settings
from pytest_vllm_cleanup import hookspecs, markers
from pytest_vllm_cleanup.fixtures import (
    ENGINE_FIXTURES,
    assert_gpu_released,
    gpu_devices,
    gpu_memory,
    vllm_runner,
    vllm_runner_factory,
)
from pytest_vllm_cleanup.guard import guarded, warn
from pytest_vllm_cleanup.stash import ISOLATED_CHILD, SETTINGS

__all__ = ["assert_gpu_released", "gpu_devices", "gpu_memory", "vllm_runner", "vllm_runner_factory"]


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SETTINGS] = settings.Settings()
    try:
        config.stash[SETTINGS] = settings.load(config)
    except pytest.UsageError:
        raise  # a wrong setting is the user's business
    except Exception as problem:
        warn("reading the settings", problem)
    with guarded("describing the markers"):
        theirs = [markers.GPUS] if markers.described_otherwise(markers.GPUS, config) else []
        for line in markers.descriptions(name for name in markers.ALL if name not in theirs):
            config.addinivalue_line("markers", line)
    _tie_workers(config)
    # The controller of pytest-xdist collects nothing, so it cannot know whether a leak will be reported to it.
    if config.getoption("dist", "no") != "no":
        with guarded("preparing the report of leaks"):
            _show_leaks(config)


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """Add ``-n gpu`` to pytest-xdist, which may be loaded before or after this plugin."""
    if isinstance(plugin, ModuleType) and plugin.__name__ == "xdist.plugin":
        with guarded("offering -n gpu"):
            from pytest_vllm_cleanup.workers.number import Number, accept_gpu

            config: Any = manager.get_plugin("pytestconfig")
            accept_gpu(config._parser)
            manager.register(Number())


def _tie_workers(config: pytest.Config) -> None:
    """Have the workers of pytest-xdist know about devices, as far as the settings say so."""
    chosen = config.stash[SETTINGS]
    if config.pluginmanager.has_plugin(ISOLATED_CHILD):
        return  # its parent has done all that
    if hasattr(config, "workerinput"):
        # Its own news from the controller, or a replacement to come; else there is nothing to do in it.
        if chosen.on_leak != "restart" and not any(key.startswith("vllm_cleanup") for key in config.workerinput):
            return
        with guarded("preparing this worker"):
            from pytest_vllm_cleanup.workers import worker

            config.pluginmanager.register(worker.Worker(config), worker.NAME)
    elif config.getoption("dist", "no") != "no":
        if chosen.on_leak == "restart":
            from pytest_vllm_cleanup.workers import restarts

            restarts.require_xdist()
        with guarded("preparing the workers"):
            if chosen.gpus == "auto":
                from pytest_vllm_cleanup.workers import controller

                config.pluginmanager.register(controller.Controller(config), controller.NAME)
            if chosen.on_leak == "restart":
                config.pluginmanager.register(restarts.Restarts(config), restarts.NAME)
    elif config.getoption("vllm_cleanup_on_leak") == "restart":
        raise pytest.UsageError(
            "--vllm-cleanup-on-leak=restart replaces a worker of pytest-xdist, and there are none: run with -n gpu or "
            "-n NUMBER, or use quarantine, fail or exit"
        )
    elif chosen.on_leak == "restart":  # an ini file or the environment, which are for runs without workers too
        config.stash[SETTINGS] = replace(chosen, on_leak="quarantine", no_workers=True)


def pytest_report_header(config: pytest.Config) -> list[str]:
    header = ""
    with guarded("showing the settings"):
        header = config.stash[SETTINGS].header()
    return [header] if header else []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Watch the tests if one of them is checked or builds engines; else this plugin is done."""
    used: Set[str] = frozenset()
    with guarded("looking for this plugin's markers"):
        used = _markers_used(session.items)
    with guarded("starting to watch the tests"):
        check_all = session.config.stash[SETTINGS].check == "all"
        if (check_all and session.items) or _anything_for_us(session.items, used):
            from pytest_vllm_cleanup.monitor import activate

            activate(session.config)
            _show_leaks(session.config)
    if markers.GPUS in used:
        with guarded("giving devices to tests"):
            _take_turns(session)
    try:
        _isolate(session, used)
    except pytest.UsageError:
        raise  # an option that cannot work is the user's business
    except Exception as problem:
        warn("preparing isolated tests", problem)


def _take_turns(session: pytest.Session) -> None:
    """Give devices to the tests that ask for several."""
    if markers.gpus_is_ours(session.config):
        from pytest_vllm_cleanup.workers import turn

        turn.activate(session.config).watch(session.items)


def _isolate(session: pytest.Session, used: Set[str]) -> None:
    """Have the isolated tests, if there are any, run in processes of their own."""
    config, wanted = session.config, session.config.stash[SETTINGS].isolate
    if wanted == "off" or not session.items or config.pluginmanager.has_plugin(ISOLATED_CHILD):
        return
    if wanted == "marked" and markers.ISOLATED not in used:
        return
    from pytest_vllm_cleanup.isolation import isolator

    if isolator.activate(config, session.items):
        _show_leaks(config)


def _markers_used(items: list[pytest.Item]) -> Set[str]:
    """Return the names of all markers on these tests and what they are in."""
    # Suites of many thousand tests pass here: parents are looked at once, not once for each of their tests.
    seen: set[object] = set()
    names: set[str] = set()
    for item in items:
        node: pytest.Item | pytest.Collector | None = item
        while node is not None and node not in seen:
            seen.add(node)
            names.update(mark.name for mark in node.own_markers)
            node = node.parent
    return names


def _anything_for_us(items: list[pytest.Item], used: Set[str]) -> bool:
    return not used.isdisjoint(markers.MARKERS) or any(
        not ENGINE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) for item in items
    )


def _show_leaks(config: pytest.Config) -> None:
    from pytest_vllm_cleanup.isolation import remembered
    from pytest_vllm_cleanup.report import terminal

    if not config.pluginmanager.has_plugin(terminal.NAME):
        config.pluginmanager.register(terminal.Terminal(), terminal.NAME)
        config.pluginmanager.register(remembered.Remembered(config), remembered.NAME)
