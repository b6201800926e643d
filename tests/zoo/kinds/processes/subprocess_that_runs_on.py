"""A server is started and never ended."""

from __future__ import annotations

import subprocess

import pytest
from zoo_expect import Expect
from zoo_processes import SERVER

EXPECT = Expect(
    reason="processes", holder="process * (python*), with *, started * ago, child of this process: *", stayed=None
)
pytestmark = pytest.mark.gpu_released
SERVERS = []


def test_the_server_comes_up():
    server = subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    SERVERS.append(server)
    assert server.stdout.readline()


def let_go():
    for server in SERVERS:
        server.kill()
        server.communicate()
