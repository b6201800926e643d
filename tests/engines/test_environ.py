"""Environment variables that several engines wrote, given back in any order."""

from __future__ import annotations

import itertools
import os

import pytest

from pytest_vllm_cleanup.engines import environ
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, State, registry

NAME = "VLLM_CLEANUP_TEST_VARIABLE"


def build(value: str) -> EngineHandle:
    """Stand for an engine that writes the variable while it is being built."""
    handle = registry.begin("LLMEngine")
    handle.state = State.LIVE
    if os.environ.get(NAME) != value:
        handle.traces.environ = {NAME: (os.environ.get(NAME), value)}
        os.environ[NAME] = value
    return handle


def close(handle: EngineHandle) -> None:
    environ.give_back(handle)
    registry.closed(handle, CloseReport())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("values", [("one", "one", "one"), ("one", "two", "three"), ("one", "one", "two")], ids=str)
@pytest.mark.parametrize("before", [None, "the user's"])
def test_the_variable_is_what_it_was_when_the_last_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], values: tuple[str, ...], before: str | None
) -> None:
    monkeypatch.setenv(NAME, "to be restored")
    if before is None:
        monkeypatch.delenv(NAME)
    else:
        monkeypatch.setenv(NAME, before)
    handles = [build(value) for value in values]
    for number in order:
        close(handles[number])
    assert os.environ.get(NAME) == before


def test_what_the_user_has_changed_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    handle = build("written")
    monkeypatch.setenv(NAME, "the user's")
    close(handle)
    assert os.environ[NAME] == "the user's"
