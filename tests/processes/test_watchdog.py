"""The watchdog from outside: a process disappears, and what it has started with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from programs import PATIENT

from pytest_vllm_cleanup.processes import births, proc, reap, watchdog
from pytest_vllm_cleanup.processes.watchdog import Watchdog, current_watchdog

DEATHS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit": "os._exit(0)",
    "segmentation fault": "signal.signal(signal.SIGSEGV, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSEGV)",
    "its own descriptors closed first": "os.closerange(3, 256); os.kill(os.getpid(), signal.SIGKILL)",
    "a forked child that holds everything open": "os.fork() or time.sleep(3); os.kill(os.getpid(), signal.SIGKILL)",
}

DYING = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {package!r})
from pytest_vllm_cleanup.processes import proc
from pytest_vllm_cleanup.processes.watchdog import current_watchdog

engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
current_watchdog().keep_stderr()
current_watchdog().ensure()
current_watchdog().add(1, [proc.identify(engine.pid)])
{more}
print(engine.pid, bystander.pid, current_watchdog().pid, flush=True)
{death}
"""
PACKAGE = str(Path(watchdog.__file__).parents[2])


def die(death: str, more: str = "", survives: bool = False) -> tuple[list[proc.ProcessId], str]:
    """Run a process that dies; return its engine, bystander and helper, and what was written to standard error."""
    code = textwrap.dedent(DYING).format(package=PACKAGE, death=death, more=more)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        identities = [proc.identify(int(number)) for number in one.stdout.readline().split()]
        one.wait(10)
        ended = gone_within(8, identities[2]) and not proc.is_running(identities[0])
        bystander = proc.is_running(identities[1])
        for identity in identities:
            reap.send(identity, signal.SIGKILL)
        assert (ended, bystander) == (not survives, True)
        return identities, one.stderr.read()


def gone_within(seconds: float, *processes: proc.ProcessId) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(proc.is_running(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def dog():
    made = Watchdog()
    yield made
    made._engines.clear()
    made.close()


def engine_of(dog, running):
    dog.ensure()
    dog.add(1, [running.identity])


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_what_a_process_leaves_is_ended_however_it_dies(death):
    (engine, _, _), errors = die(death)
    assert f"ended {engine.pid} (" in errors
    assert "is gone without having closed its engines" in errors


def test_a_closed_engine_is_left_alone_and_nothing_is_said():
    assert die(DEATHS["SIGKILL"], "current_watchdog().forget(1)", survives=True)[1] == ""


def test_the_helper_is_started_with_the_first_engine_and_not_before(dog):
    assert dog.pid is None
    dog.ensure()
    helper = proc.identify(dog.pid)
    dog.ensure()
    assert proc.identify(dog.pid) == helper
    dog.close()
    assert dog.pid is None
    assert not proc.is_running(helper)


def test_the_helper_imports_only_the_standard_library(dog):
    dog.ensure()
    dog.known(1)
    maps = Path(f"/proc/{dog.pid}/maps").read_text()
    assert "site-packages" not in maps
    assert os.getsid(dog.pid) == dog.pid  # no Ctrl-C reaches it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_polite_signals_do_not_end_the_helper(dog, start, number):
    engine_of(dog, start())
    dog.known(1)
    os.kill(dog.pid, number)
    time.sleep(0.1)
    assert dog.known(1)
    assert dog._starts == 1


def test_a_helper_that_was_killed_is_replaced_and_told_everything(dog, start):
    one = start()
    engine_of(dog, one)
    first = dog.pid
    os.kill(first, signal.SIGKILL)
    assert gone_within(5, proc.identify(first) or proc.ProcessId(first, 0))
    dog.ensure()
    assert dog.pid != first
    dog._engines[1].clear()  # what the new helper answers is what it knows itself
    dog._engines[1].add(proc.ProcessId(1, 1))
    assert one.identity in dog.known(1)


def test_a_helper_that_has_died_is_noticed_when_it_is_told_something(dog, start):
    engine_of(dog, start())
    os.kill(dog.pid, signal.SIGKILL)
    time.sleep(0.1)
    other = start()
    dog.add(2, [other.identity])
    assert other.identity in dog.known(2)
    assert dog._starts == 2


def test_a_helper_that_hangs_is_replaced(dog, start, monkeypatch):
    monkeypatch.setattr(watchdog, "_ANSWER", 0.3)
    one = start()
    engine_of(dog, one)
    first = dog.pid
    os.kill(first, signal.SIGSTOP)
    assert dog.known(1) == {one.identity}
    assert dog.pid != first
    assert dog.known(1) == {one.identity}


def test_it_stays_while_there_are_engines_and_leaves_when_they_are_closed(dog, start):
    engine_of(dog, start())
    dog.close()
    assert dog.pid is not None
    dog.forget(1)
    dog.close()
    assert dog.pid is None


def test_without_a_helper_a_run_goes_on_with_a_warning(dog, start, monkeypatch):
    one = start()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.warns(UserWarning, match=r"keeping up the watchdog.*FileNotFoundError"):
        dog.ensure()
    with pytest.warns(UserWarning, match="keeping up the watchdog"):
        dog.add(1, [one.identity])
    monkeypatch.undo()
    assert dog.known(1) == {one.identity}


def test_one_that_dies_again_and_again_is_given_up(dog, monkeypatch):
    monkeypatch.setattr(watchdog, "_CODE", "raise SystemExit")

    def use_it_often():
        for _ in range(12):
            dog.ensure()
            dog._helper.wait()

    with pytest.warns(UserWarning, match="has ended 9 times"):
        use_it_often()
    assert dog._starts == watchdog._STARTS


def test_a_forked_child_has_none_of_its_parents_watchdog(dog, start):
    parent = current_watchdog()
    parent.ensure()
    engine_of(dog, start(PATIENT))
    child = os.fork()
    if child == 0:
        mine = current_watchdog()
        os._exit(0 if mine is not parent and mine.pid is None and parent.pid is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dog.known(1)
    parent.close()


def test_a_helper_that_cannot_be_reached_is_replaced(dog, start):
    engine_of(dog, start())
    first = dog.pid
    os.close(dog._connection.fileno())  # as a test does that closes all descriptors
    other = start()
    dog.add(2, [other.identity])
    assert dog.pid != first
    assert other.identity in dog.known(2)


def test_nothing_is_written_to_whoever_has_got_the_number_of_our_socket(dog, start):
    engine_of(dog, start())
    number = dog._connection.fileno()
    theirs, peer = socket.socketpair()
    os.dup2(theirs.fileno(), number)
    other = start()
    dog.add(2, [other.identity])
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    os.fstat(number)  # it is still open
    os.close(number)
    theirs.close()
    peer.close()
    assert other.identity in dog.known(2)


def test_an_interrupt_between_question_and_answer_spoils_no_later_answer(dog, start, monkeypatch):
    one, other = start(), start()
    engine_of(dog, one)
    dog.add(2, [other.identity])
    with monkeypatch.context() as patched:
        patched.setattr(dog, "_answer", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            dog.known(1)
    assert dog.known(2) == {other.identity}
    assert dog.known(1) == {one.identity}


def test_helpers_that_are_killed_now_and_then_are_replaced_for_ever(dog, monkeypatch):
    monkeypatch.setattr(watchdog, "_YOUNG", 0.0)
    for _ in range(2 * watchdog._STARTS):
        dog.ensure()
        dog._helper.kill()
        dog._helper.wait()
    dog.ensure()
    assert dog.pid is not None


def test_a_helper_that_is_started_while_children_are_observed_is_nobodys_child(dog):
    seen = []
    with births.observed(lambda pid, _line: seen.append(dog.is_starting)):
        dog.ensure()
    assert seen
    assert all(seen)
    assert not dog.is_starting
