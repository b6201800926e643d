"""What a test writes straight into the JUnit report, from its process to the one that has the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_vllm_cleanup.isolation.wire import plain

Entry = tuple[str, str, Any]
_NAME = "vllm_cleanup_isolated_junit"


def family(config: pytest.Config) -> str | None:
    """Return the format of the JUnit report that a process writes, None if it writes none."""
    xml = _report_of(config)
    return None if xml is None else xml.family


def relay(config: pytest.Config, family: str | None, send: Callable[[Entry], None]) -> None:
    """Have pytest's fixtures find a report here, as the parent does: one that passes on what it is given."""
    if family is not None:
        from _pytest.junitxml import xml_key

        found: Any = _Relay(family, send)
        config.stash[xml_key] = found
        config.pluginmanager.register(found, _NAME)  # as pytest takes it away again


def write(config: pytest.Config, nodeid: str, entry: Entry) -> None:
    """Write into the report, if there is one, what a test has written in its process."""
    xml, (kind, name, value) = _report_of(config), entry
    if xml is None:
        return
    if kind == "attribute":
        xml.node_reporter(nodeid).add_attribute(name, value)
    else:
        xml.add_global_property(name, value)
        # A fixture of the session's scope says it in each process.
        xml.global_properties[:] = dict.fromkeys(xml.global_properties)


def _report_of(config: pytest.Config) -> Any:
    try:
        from _pytest.junitxml import xml_key
    except ImportError:
        return None
    return config.stash.get(xml_key, None)


class _Relay:
    """What pytest's fixtures use of the writer of a JUnit report."""

    def __init__(self, family: str, send: Callable[[Entry], None]) -> None:
        self.family = family
        self._send = send

    def node_reporter(self, _nodeid: str) -> _Relay:
        return self

    def add_attribute(self, name: str, value: object) -> None:
        self._send(("attribute", str(name), plain(value)))

    def add_global_property(self, name: str, value: object) -> None:
        self._send(("property", name, plain(value)))
