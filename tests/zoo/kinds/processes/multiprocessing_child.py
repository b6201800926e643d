"""A worker of multiprocessing is never joined."""

from __future__ import annotations

import multiprocessing

import pytest
from zoo_expect import Expect
from zoo_processes import serve

EXPECT = Expect(
    reason="processes", holder="process * (python*), with *, started * ago, child of this process: *", stayed=None
)
pytestmark = pytest.mark.gpu_released
WORKERS = []


def test_the_worker_comes_up():
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    worker = spawn.Process(target=serve, args=(ready, stop), name="sampler", daemon=True)
    worker.start()
    WORKERS.append((worker, stop))
    assert ready.wait(60)


def let_go():
    for worker, stop in WORKERS:
        stop.set()
        worker.join()
    WORKERS.clear()
