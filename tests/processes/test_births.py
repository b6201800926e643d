"""Seeing who starts which child."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing.process import BaseProcess

import pytest

from pytest_vllm_cleanup.processes import births


def nothing() -> None:
    """Run in a child process."""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing_are_seen(method):
    born = []
    with births.observed(lambda pid, _line: born.append(pid)):
        process = multiprocessing.get_context(method).Process(target=nothing)
        process.start()
    process.join()
    assert process.exitcode == 0
    assert process.pid in born  # spawning may start Python's helper, too


def test_programs_are_seen_with_the_thread_that_starts_them():
    born = []
    with births.observed(lambda pid, line: born.append((pid, {thread.name for thread in line}))):
        here = subprocess.Popen([sys.executable, "-c", ""])
        there = []
        thread = threading.Thread(target=lambda: there.append(subprocess.Popen([sys.executable, "-c", ""])), name="t")
        thread.start()
        thread.join()
    here.wait(), there[0].wait()
    assert born == [(here.pid, {"MainThread"}), (there[0].pid, {"t", "MainThread"})]


def test_nothing_stays_patched():
    before = BaseProcess.start, subprocess.Popen.__init__, threading.Thread.start
    with births.observed(lambda *_: None), births.observed(lambda *_: None):
        assert (BaseProcess.start, subprocess.Popen.__init__, threading.Thread.start) != before
    assert (BaseProcess.start, subprocess.Popen.__init__, threading.Thread.start) == before


def test_a_wrapper_that_somebody_has_put_around_ours_stays(monkeypatch):
    seen = []
    with births.observed(lambda *_: None):
        ours = subprocess.Popen.__init__

        def theirs(self, *args, **kwargs):
            seen.append(1)
            ours(self, *args, **kwargs)

        monkeypatch.setattr(subprocess.Popen, "__init__", theirs)
    subprocess.Popen([sys.executable, "-c", ""]).wait()
    assert seen == [1]


def test_a_failing_start_is_the_users_error():
    born = []
    with births.observed(lambda pid, _line: born.append(pid)), pytest.raises(FileNotFoundError):
        subprocess.Popen(["/no/such/program"])
    assert born == []


def test_a_bug_in_an_observer_does_not_stop_a_process(recwarn):
    def observer(pid, line):
        raise RuntimeError("bug")

    with births.observed(observer):
        assert subprocess.Popen([sys.executable, "-c", ""]).wait() == 0
    assert "RuntimeError: bug" in str(recwarn.pop().message)


def test_a_forked_child_does_not_tell():
    born = []
    with births.observed(lambda pid, _line: born.append(pid)):
        process = multiprocessing.get_context("fork").Process(target=_start_a_program, args=(born,))
        process.start()
        process.join()
    assert process.exitcode == 0
    assert born == [process.pid]


def _start_a_program(born) -> None:
    born.clear()
    subprocess.Popen([sys.executable, "-c", ""]).wait()
    assert born == []
