"""The fake GPU of each process, on which processes that are named in a file hold memory. A plugin of inner runs."""

from __future__ import annotations

import os
from pathlib import Path

import fake_gpu
import pytest

from pytest_vllm_cleanup.engines import measure
from pytest_vllm_cleanup.memory import Gauge

HOLDERS = Path(__file__).with_name("holders.txt")


class SharedMeter(fake_gpu.FakeMeter):
    def read(self, ours):
        lines = HOLDERS.read_text().splitlines() if HOLDERS.exists() else []
        held = [int(size) for pid, size in map(str.split, lines) if _lives(int(pid))]
        fake_gpu.gpu.children = sum(held)
        return super().read(ours)


def hold(pid, size):
    with HOLDERS.open("a") as file:
        file.write(f"{pid} {size}\n")


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.hookimpl(trylast=True)
def pytest_configure():
    measure._gauges[os.getpid()] = Gauge([SharedMeter()], measure.our_processes)
