"""Which processes there are, and which belong to an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import resource_tracker

import psutil
from programs import FAMILY

from pytest_vllm_cleanup.processes import proc, tree
from pytest_vllm_cleanup.processes.proc import ProcessId

LEADER_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def until(condition, timeout: float = 5.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def test_a_process_is_known_by_number_and_start(start):
    one = start()
    assert one.identity.pid == one.popen.pid
    created = psutil.boot_time() + one.identity.started / os.sysconf("SC_CLK_TCK")
    assert abs(created - psutil.Process(one.popen.pid).create_time()) < 2


def test_a_name_with_parentheses_and_spaces_does_not_confuse(start):
    one = start("import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print('up', flush=True); input()")
    assert proc.identify(one.popen.pid) == one.identity
    assert proc.is_running(one.identity)


def test_a_zombie_does_not_run(start):
    one = start()
    one.popen.kill()
    assert until(lambda: psutil.Process(one.popen.pid).status() == psutil.STATUS_ZOMBIE)
    assert not proc.is_running(one.identity)


def test_a_process_whose_first_thread_has_ended_still_runs(start):
    one = start(LEADER_ENDS)
    assert until(lambda: psutil.Process(one.popen.pid).status() == psutil.STATUS_ZOMBIE)
    assert proc.is_running(one.identity)


def test_a_recycled_number_is_another_process(start):
    one = start()
    former = replace(one.identity, started=one.identity.started - 100)
    assert not proc.is_running(former)
    assert tree.family([former]) == frozenset()


def test_children_of_whoever_has_a_recycled_number_are_not_ours(start):
    one = start(FAMILY)
    assert proc.descendants([replace(one.identity, started=one.identity.started - 100)]) == frozenset()


def test_what_is_no_process_has_no_identity_and_no_command():
    assert proc.identify(2**22 + 1) is None
    assert proc.command(2**22 + 1) == ""
    assert proc.parent(ProcessId(2**22 + 1, 1)) is None


def test_a_family_is_the_recorded_and_what_they_have_started(start):
    one = start(FAMILY)
    child = proc.identify(int(one.line))
    family = tree.family([one.identity])
    assert family == {one.identity, child}
    assert tree.roots(family) == {one.identity}


def test_a_child_outlives_its_parent_in_the_family_once_it_is_recorded(start):
    one = start(FAMILY)
    known = tree.family([one.identity])
    one.popen.kill()
    one.popen.wait()
    child = proc.identify(int(one.line))
    assert tree.family(known) == {child}
    os.kill(child.pid, signal.SIGKILL)


def test_this_process_is_never_in_a_family():
    me = proc.identify(os.getpid())
    assert me not in tree.family([me])


def test_pythons_helpers_are_left_to_the_session():
    resource_tracker.ensure_running()
    helper = proc.identify(resource_tracker._resource_tracker._pid)
    # Between fork and exec it still has this process's command; whoever reads then reads again before it signals.
    deadline = time.monotonic() + 10
    while tree.family([helper]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tree.family([helper]) == frozenset()


def test_a_bystander_with_an_engines_title_in_our_group_and_session_is_in_no_family(start):
    title = "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); " if _has_setproctitle() else ""
    bystander = subprocess.Popen([sys.executable, "-c", title + "import time; time.sleep(60)"])
    try:
        identity = proc.identify(bystander.pid)
        assert identity not in tree.family([start().identity])
    finally:
        bystander.kill()
        bystander.wait()


def _has_setproctitle() -> bool:
    try:
        import setproctitle  # noqa: F401
    except ImportError:
        return False
    return True


def test_processes_are_described_for_people(start):
    one = start()
    assert tree.describe([one.identity]).startswith(f"{one.identity.pid} ({sys.executable}")
    assert tree.describe([ProcessId(2**22 + 1, 1)]) == f"{2**22 + 1} (ended)"
