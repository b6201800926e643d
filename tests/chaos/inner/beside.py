"""Engines among processes that look like them: a child of pytest, and one that another thread starts meanwhile."""

from __future__ import annotations

import os
import signal
import time

import pytest
from chaos_diary import note
from chaos_engines import BUILDING, as_soon_as, build, core, inside, start_bystander


@pytest.fixture
def bystanders():
    """The numbers of the processes that are none of the engine's."""
    return [start_bystander()]


@pytest.fixture
def engine(bystanders, vllm_runner):
    thread = as_soon_as(inside(BUILDING), lambda: bystanders.append(start_bystander()))
    made = build(vllm_runner)
    thread.join(20)
    assert len(bystanders) == 2
    return made


def test_waits(engine):
    note("ready")
    time.sleep(120)


def test_stuck(engine, bystanders):
    os.kill(core(besides=bystanders).pid, signal.SIGSTOP)


def test_closed(engine):
    pass
