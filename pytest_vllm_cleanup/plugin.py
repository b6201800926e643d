"""What pytest loads. Imports the standard library and pytest only; everything else waits until a test needs it."""

from __future__ import annotations

import pytest

from pytest_vllm_cleanup import config as settings
from pytest_vllm_cleanup import markers
from pytest_vllm_cleanup.fixtures import (
    ENGINE_FIXTURES,
    assert_gpu_released,
    gpu_memory,
    vllm_runner,
    vllm_runner_factory,
)
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.stash import SETTINGS

__all__ = ["assert_gpu_released", "gpu_memory", "vllm_runner", "vllm_runner_factory"]


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SETTINGS] = settings.Settings()
    with guarded("reading the settings"):
        config.stash[SETTINGS] = settings.load(config)
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
        if (check_all and session.items) or any(_concerns_us(item) for item in session.items):
            from pytest_vllm_cleanup.monitor import activate

            activate(session.config)
            _show_leaks(session.config)


def _concerns_us(item: pytest.Item) -> bool:
    if not ENGINE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return True
    return any(mark.name in markers.MARKERS for mark in item.iter_markers())


def _show_leaks(config: pytest.Config) -> None:
    from pytest_vllm_cleanup.report import terminal

    if not config.pluginmanager.has_plugin(terminal.NAME):
        config.pluginmanager.register(terminal.Terminal(), terminal.NAME)
