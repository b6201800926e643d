"""A launcher starts the server and ends; the server is nobody's child any more."""

from __future__ import annotations

import subprocess

import pytest
from zoo_expect import Expect
from zoo_processes import SERVER

EXPECT = Expect(reason="processes", holder="process * (python*), with *", stayed=None)
pytestmark = pytest.mark.gpu_released
LAUNCHERS = []


def test_the_server_comes_up():
    # A shell gives what it starts in the background no standard input, unless it is told to.
    launcher = subprocess.Popen(
        ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", *SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    LAUNCHERS.append(launcher)
    assert launcher.stdout.readline()
    assert launcher.wait(10) == 0


def let_go():
    for launcher in LAUNCHERS:
        launcher.stdin.close()
        launcher.stdout.read()  # to the end of the server
