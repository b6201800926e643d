"""Which processes are measured as this one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import resource_tracker

from pytest_vllm_cleanup.engines.measure import our_processes
from pytest_vllm_cleanup.processes import marks
from pytest_vllm_cleanup.processes.watchdog import Watchdog, current_watchdog

RUN_INSIDE = """
import subprocess, sys
from multiprocessing import resource_tracker
from pytest_vllm_cleanup.processes.watchdog import current_watchdog
resource_tracker.ensure_running()
current_watchdog().ensure()
server = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print(server.pid, current_watchdog().pid, resource_tracker._resource_tracker._pid, flush=True)
sys.stdin.read()
"""


def test_what_an_ended_launcher_has_started_is_ours():
    command = ["sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!', "sh", sys.executable, "-c", "import sys; sys.stdin.read()"]
    with marks.marked(), subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        orphan = int(launcher.stdout.readline())
        assert launcher.wait(10) == 0
        assert {os.getpid(), orphan} <= our_processes()
        launcher.stdin.close()


def test_helpers_of_this_process_are_not_its_own():
    resource_tracker.ensure_running()
    current_watchdog().ensure()
    another = Watchdog()
    another.ensure()
    helpers = {resource_tracker._resource_tracker._pid, current_watchdog().pid, another.pid}
    try:
        assert None not in helpers
        assert helpers.isdisjoint(our_processes())
    finally:
        another.close()


def test_helpers_of_a_process_that_we_have_started_are_not_ours():
    with (
        marks.marked(),
        subprocess.Popen([sys.executable, "-c", RUN_INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inner,
    ):
        server, *helpers = map(int, inner.stdout.readline().split())
        ours = our_processes()
        assert {inner.pid, server} <= ours
        assert ours.isdisjoint(helpers)
        inner.stdin.close()
