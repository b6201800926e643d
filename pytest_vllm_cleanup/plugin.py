"""What pytest loads. Imports the standard library and pytest only; everything else waits until a test needs it."""

from __future__ import annotations

import pytest

from pytest_vllm_cleanup import config as settings
from pytest_vllm_cleanup import hookspecs, markers
from pytest_vllm_cleanup.fixtures import (
    ENGINE_FIXTURES,
    assert_gpu_released,
    gpu_memory,
    vllm_runner,
    vllm_runner_factory,
)
from pytest_vllm_cleanup.guard import guarded, warn
from pytest_vllm_cleanup.stash import SETTINGS

__all__ = ["assert_gpu_released", "gpu_memory", "vllm_runner", "vllm_runner_factory"]


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
        for line in markers.descriptions():
            config.addinivalue_line("markers", line)
    # The controller of pytest-xdist collects nothing, so it cannot know whether a leak will be reported to it.
    if config.getoption("dist", "no") != "no":
        with guarded("preparing the report of leaks"):
            _show_leaks(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    header = ""
    with guarded("showing the settings"):
        header = config.stash[SETTINGS].header()
    return [header] if header else []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Watch the tests if one of them is checked or builds engines; else this plugin is done."""
    with guarded("starting to watch the tests"):
        check_all = session.config.stash[SETTINGS].check == "all"
        if (check_all and session.items) or _anything_for_us(session.items):
            from pytest_vllm_cleanup.monitor import activate

            activate(session.config)
            _show_leaks(session.config)


def _anything_for_us(items: list[pytest.Item]) -> bool:
    # Suites of many thousand tests pass here: parents are looked at once, not once for each of their tests.
    seen: dict[object, bool] = {}
    return any(
        _is_marked(item)
        or _has_marked_parent(item, seen)
        or not ENGINE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        for item in items
    )


def _is_marked(node: pytest.Item | pytest.Collector) -> bool:
    return any(mark.name in markers.MARKERS for mark in node.own_markers)


def _has_marked_parent(node: pytest.Item | pytest.Collector, seen: dict[object, bool]) -> bool:
    parent = node.parent
    if not isinstance(parent, pytest.Collector):
        return False
    if parent not in seen:
        seen[parent] = _is_marked(parent) or _has_marked_parent(parent, seen)
    return seen[parent]


def _show_leaks(config: pytest.Config) -> None:
    from pytest_vllm_cleanup.report import terminal

    if not config.pluginmanager.has_plugin(terminal.NAME):
        config.pluginmanager.register(terminal.Terminal(), terminal.NAME)
