from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_vllm_cleanup.diagnosis.processes import describe
from pytest_vllm_cleanup.processes import marks

SLEEPS = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def start():
    """Start Python, and come back when it runs: a process that has just begun has no command line yet."""
    started = []

    def start(*arguments):
        started.append(subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE))
        assert started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def child(start):
    return start(SLEEPS)


def test_a_child_is_described_with_its_engine_and_its_parent(child):
    (facts,) = describe([child.pid], {child.pid: 3 << 30}, {child.pid: "LLMEngine number 2"})
    assert (facts.pid, facts.bytes, facts.parent, facts.engine) == (
        child.pid,
        3 << 30,
        "this process",
        "LLMEngine number 2",
    )
    assert 0 <= facts.age < 60
    start = f"process {child.pid} ({facts.name}), with 3 GiB, of LLMEngine number 2, started {facts.age:.1f} s ago, "
    assert str(facts).startswith(f"{start}child of this process: ")
    assert str(facts).endswith(SLEEPS[-20:])  # the middle of a long command line is left out


def test_a_child_of_a_child_names_the_one_between(start):
    source = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); child.wait()"
    between = start(source)  # the line is that of its child
    (grandchild,) = psutil.Process(between.pid).children()
    try:
        (facts,) = describe([grandchild.pid], {}, {between.pid: "LLMEngine number 1"})
        assert facts.parent.startswith(f"process {between.pid} of LLMEngine number 1 (")
        assert facts.bytes is None
    finally:
        grandchild.kill()


@pytest.fixture
def orphan(monkeypatch):
    """A process whose launcher has ended; started with the mark of this run, or that of another."""
    inputs = []

    def orphan(mark):
        command = [
            "sh",
            "-c",
            'exec 3<&0; "$@" <&3 & echo $!',
            "sh",
            sys.executable,
            "-c",
            "import sys; sys.stdin.read()",
        ]
        with marks.marked():
            if mark:
                monkeypatch.setenv(marks.VARIABLE, mark)
            launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        inputs.append(launcher)
        assert launcher.wait(10) == 0
        pid = int(launcher.stdout.readline())
        deadline = time.monotonic() + 10
        while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(os.fsencode(sys.executable)):
            assert time.monotonic() < deadline, "it is still the shell's fork"
            time.sleep(0.01)
        return pid

    yield orphan
    for launcher in inputs:
        launcher.communicate()  # to the end of the orphan


def test_of_a_process_whose_launcher_has_ended_it_is_said(orphan):
    (facts,) = describe([orphan(mark=None)], {}, {})
    assert facts.orphan
    assert f"started {facts.age:.1f} s ago, whose parent has ended: {sys.executable}" in str(facts)
    assert "child of" not in str(facts)


def test_of_a_process_of_an_engine_whose_parent_has_ended_it_is_said(orphan):
    pid = orphan(mark="17.4711")
    assert describe([pid], {}, {pid: "LLMEngine number 1"})[0].orphan


def test_of_a_strangers_parent_nothing_is_said_but_who_it_is(orphan):
    (facts,) = describe([orphan(mark="17.4711")], {}, {})
    assert not facts.orphan
    assert facts.parent.startswith("process ")


def test_the_biggest_comes_first_and_each_once(child):
    facts = describe([child.pid, os.getpid(), child.pid], {os.getpid(): 5, child.pid: 7}, {})
    assert [fact.pid for fact in facts] == [child.pid, os.getpid()]


def test_a_process_that_has_ended_is_said_to_have_ended(child):
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    gone = f"process {child.pid}, which has ended or is hidden from here"
    assert str(describe([child.pid], {}, {})[0]) == gone
    child.wait()
    assert str(describe([child.pid], {}, {})[0]) == gone


def test_a_long_command_keeps_both_ends(start):
    long = start(SLEEPS, *["x" * 20] * 20, "the-end")
    (facts,) = describe([long.pid], {}, {})
    assert len(facts.command) <= 80
    assert facts.command.startswith(sys.executable[:20])
    assert facts.command.endswith("the-end")
