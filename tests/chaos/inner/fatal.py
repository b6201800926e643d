"""Deaths that end a test run. Each test is run alone; those that wait are killed from outside, at what they note."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
from chaos_diary import note
from chaos_engines import BUILDING, CLOSING, WITH_WORKER, as_soon_as, build, has_worker, inside

KEPT = []


def wait_to_be_killed():
    note("ready")
    time.sleep(120)


def test_waits(vllm_runner):
    as_soon_as(inside(BUILDING), lambda: note("building"))
    build(vllm_runner)
    as_soon_as(inside(CLOSING), lambda: note("closing"))
    wait_to_be_killed()


def test_waits_with_a_worker(vllm_runner):
    as_soon_as(has_worker, lambda: note("building"))
    build(vllm_runner, **WITH_WORKER)
    wait_to_be_killed()


@pytest.fixture
def slow_teardown(vllm_runner):
    build(vllm_runner)
    yield
    wait_to_be_killed()


def test_has_a_fixture_with_a_slow_teardown(slow_teardown):
    pass


def test_os_exit(vllm_runner):
    build(vllm_runner)
    os._exit(5)


def test_segfault(vllm_runner):
    build(vllm_runner)
    ctypes.string_at(0)


@pytest.fixture
def engine(vllm_runner):
    return build(vllm_runner)


@pytest.mark.timeout(1, method="thread", func_only=True)
def test_timeout_by_thread(engine):
    time.sleep(60)


def test_passes(vllm_runner):
    build(vllm_runner)


# From here on, engines that no fixture closes: their tests keep them.


@pytest.fixture
def kept_engine(vllm_runner):
    from vllm import LLM

    KEPT.append(build(LLM))


def test_pytest_exit(kept_engine):
    pytest.exit("enough", returncode=7)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_fails(kept_engine, number):
    raise AssertionError(f"failure {number}")
