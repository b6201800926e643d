"""A launcher that is never ended has started the server that takes the memory."""

from __future__ import annotations

import subprocess

import pytest
from zoo_expect import Expect
from zoo_processes import SERVER

EXPECT = Expect(
    reason="processes", holder="process * (python*), with *, started * ago, child of process * (sh -c *", stayed=None
)
pytestmark = pytest.mark.gpu_released
LAUNCHERS = []


def test_the_server_comes_up():
    launcher = subprocess.Popen(
        ["sh", "-c", '"$@"; echo ended', "sh", *SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    LAUNCHERS.append(launcher)
    assert launcher.stdout.readline()


def let_go():
    for launcher in LAUNCHERS:
        launcher.communicate()  # closes the input of both
