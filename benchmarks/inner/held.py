"""Tests that end while something still refers to their engine."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
from diary import build, note

pytestmark = pytest.mark.gpu_released


class Callbacks:
    """Outlives every test, as the registries of libraries do."""

    on_request: ClassVar[list] = []


class Owner:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self, engine):
        self.engine = engine
        self.me = self


ENGINE = None


@pytest.fixture
def runner(vllm_runner, request):
    runner = build(vllm_runner)
    yield runner
    # Closing it a second time does nothing but return the report of the first time.
    request.session.config.add_cleanup(lambda: report(request.node.name, runner))


def report(test, runner):
    closed = runner.close()
    steps = [[name, round(seconds, 4)] for name, seconds, _ in closed.steps]
    note("closed", test=test, seconds=round(closed.seconds, 4), steps=steps, errors=closed.errors)


def test_stray_reference(runner):
    Callbacks.on_request.append(runner.llm.generate)


def test_reference_cycle(runner):
    Owner(runner.llm)


def test_module_global(runner):
    global ENGINE
    ENGINE = runner.llm


def test_plain_local():
    from vllm import LLM

    engine = build(LLM)
    started = time.monotonic()
    del engine
    note("closed", test="test_plain_local", seconds=round(time.monotonic() - started, 4), steps=None, errors=[])
