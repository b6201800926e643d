"""A server is started and ended by the test."""

from __future__ import annotations

import subprocess

import pytest
from zoo_expect import CLEAN
from zoo_processes import SERVER

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_the_server_comes_up():
    with subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline()
