"""Tests whose process ends or hangs. Also a plugin, in the process of the run: it has less patience there."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time

import pytest

pytestmark = pytest.mark.vllm_isolated


def pytest_configure():
    from pytest_vllm_cleanup.isolation import attempt

    attempt._EXIT = 1.0


def last_words():
    print("last words", flush=True)
    os.write(2, b"last cries")


def test_exit_0():
    last_words()
    os._exit(0)


def test_exit_3():
    os._exit(3)


def test_segfault():
    ctypes.string_at(0)


def test_killed():
    last_words()
    os.kill(os.getpid(), signal.SIGKILL)


def test_terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.fixture
def deadly():
    os._exit(5)


def test_dies_in_setup(deadly):
    pass


@pytest.fixture
def deadly_at_end():
    yield
    os._exit(6)


def test_dies_in_teardown(deadly_at_end):
    pass


@pytest.mark.vllm_isolated(timeout="4 s")
def test_hangs():
    last_words()
    time.sleep(600)


@pytest.mark.xfail(reason="known")
def test_xfail_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.xfail(reason="known", strict=True)
def test_xfail_strict_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.xfail(reason="known", raises=OSError)
def test_xfail_raises_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_raises_system_exit():
    sys.exit(3)


def test_hangs_at_exit():
    threading.Thread(target=time.sleep, args=(600,)).start()


def leave_an_engine():
    from pytest_vllm_cleanup import leaving
    from pytest_vllm_cleanup.engines.registry import registry

    registry.begin("LLMEngine")
    leaving.close_handle = lambda _handle: time.sleep(2)  # it may have to wait for its turn


def test_closes_an_engine_for_long():
    leave_an_engine()


def test_waits_for_long_to_leave():
    from pytest_vllm_cleanup.workers import starting

    starting.leave = lambda: time.sleep(2)


def test_hangs_between(request):
    leave_an_engine()
    request.config.add_cleanup(lambda: time.sleep(600))


def test_crashes_at_exit():
    atexit.register(ctypes.string_at, 0)


def test_passes():
    pass
