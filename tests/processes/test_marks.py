"""Which processes this one has started, also those that are nobody's child any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from programs import PATIENT

from pytest_vllm_cleanup.processes import marks, proc

LAUNCHER = ["sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!', "sh"]
"""Starts a command in the background, prints its number, and ends."""

EXECUTES = f"""
import os, sys
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
environ = dict(os.environ, {marks.VARIABLE}=sys.stdin.readline().strip())
os.execve(sys.executable, [sys.executable, "-c", {PATIENT!r}], environ)
"""
"""Forks, and its first process ends. The other one starts a program later, with the mark that it reads."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is remembered, and there is no outer run."""
    monkeypatch.setattr(marks, "_ours", frozenset())
    monkeypatch.setattr(marks, "_strangers", frozenset())
    monkeypatch.delenv(marks.VARIABLE, raising=False)


@pytest.fixture
def launch():
    """Start a command through a launcher that has ended when this returns; returns the process."""
    with ExitStack() as stack:

        def launch(*command, environ=None):
            command = command or (sys.executable, "-c", PATIENT)
            launcher = subprocess.Popen(
                [*LAUNCHER, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
            )
            stack.callback(launcher.stdout.close)
            stack.callback(launcher.stdin.close)  # it ends at the end of its input
            pid = int(launcher.stdout.readline())
            assert launcher.stdout.readline()
            assert launcher.wait(10) == 0
            return proc.identify(pid), launcher

        yield launch


def until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def my_mark():
    with marks.marked():
        return os.environ[marks.VARIABLE]


def below_me():
    return proc.descendants([proc.identify(os.getpid())])


def test_a_child_is_ours_with_or_without_the_mark(start):
    assert start().identity in marks.started_by_me()


def test_what_an_ended_launcher_has_started_is_ours(launch):
    with marks.marked():
        orphan, _ = launch()
    assert orphan not in below_me()
    assert orphan in marks.started_by_me()


def test_without_the_mark_it_is_not_seen(launch):
    orphan, _ = launch()
    assert orphan not in marks.started_by_me()


def test_children_of_an_orphan_are_ours_whatever_their_environment_is(launch):
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {PATIENT!r}], env={{}}, "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE); child.stdout.readline(); print(child.pid, flush=True); "
        "sys.stdin.read()"
    )
    with marks.marked():
        orphan, _ = launch(sys.executable, "-c", code)
    (child,) = proc.descendants([orphan])
    assert {orphan, child} <= marks.started_by_me()


def test_the_mark_of_another_run_is_another(launch):
    later = f"{my_mark()}0"  # begins like ours
    others, _ = launch(environ={**os.environ, marks.VARIABLE: later})
    only_named, _ = launch(environ={**os.environ, "NOTE": my_mark()})
    assert {others, only_named}.isdisjoint(marks.started_by_me())


def test_what_a_run_inside_this_one_has_started_is_ours_too(launch, monkeypatch):
    monkeypatch.setenv(marks.VARIABLE, "17.4711")
    with marks.marked():
        inner = f"{os.environ[marks.VARIABLE]}:99.5000"
    assert inner == f"17.4711:{my_mark().removeprefix('17.4711:')}:99.5000"
    orphan, _ = launch(environ={**os.environ, marks.VARIABLE: inner})
    assert orphan in marks.started_by_me()


def test_a_process_that_starts_its_program_late_is_asked_again():
    with subprocess.Popen(
        [sys.executable, "-c", EXECUTES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        between = proc.identify(int(parent.stdout.readline()))
        assert parent.wait(10) == 0
        assert between not in marks.started_by_me()
        parent.stdin.write(f"{my_mark()}\n")
        parent.stdin.flush()
        assert parent.stdout.readline()
        assert between in marks.started_by_me()
        parent.stdin.close()


@pytest.fixture
def asked(monkeypatch):
    """The files in which marks were looked for."""
    asked = []

    def noting(path, mode):
        asked.append(path)
        return Path(path).open(mode)

    monkeypatch.setattr(marks, "_open", noting)
    return asked


def test_each_process_is_asked_once(launch, monkeypatch, asked):
    with marks.marked():
        orphan, _ = launch()
    stranger, _ = launch()
    files = {f"/proc/{process.pid}/environ" for process in (orphan, stranger)}
    monkeypatch.setattr(marks, "_YOUNG", 0.1)
    time.sleep(0.2)
    assert orphan in marks.started_by_me()
    assert files <= set(asked)
    asked.clear()
    assert orphan in marks.started_by_me()
    assert files.isdisjoint(asked)


def test_processes_that_were_there_before_this_one_are_not_asked(asked):
    me = proc.identify(os.getpid())
    before = {
        f"/proc/{entry.identity.pid}/environ" for entry in proc.everybody() if entry.identity.started < me.started
    }
    marks.started_by_me()
    assert before.isdisjoint(asked)


def test_those_that_have_ended_are_forgotten(launch, monkeypatch):
    monkeypatch.setattr(marks, "_YOUNG", 0.0)
    stranger, launcher = launch()
    with marks.marked():
        orphan, launcher_of_ours = launch()
    assert until(lambda: orphan in marks.started_by_me() and stranger in marks._strangers)  # once it is old enough
    launcher.stdin.close()
    launcher_of_ours.stdin.close()
    assert until(lambda: not proc.is_running(orphan) and not proc.is_running(stranger))
    assert orphan not in marks.started_by_me()
    assert orphan not in marks._ours
    assert stranger not in marks._strangers


def test_what_was_once_seen_below_us_stays_ours(start):
    code = (
        f"import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {PATIENT!r}], env={{}}, "
        "stdout=subprocess.DEVNULL); print(child.pid, flush=True); os.wait()"
    )
    one = start(code)
    child = proc.identify(int(one.line))
    assert child in marks.started_by_me()
    one.popen.kill()
    one.popen.wait()
    assert child not in below_me()
    assert child in marks.started_by_me()
    one.popen.stdin.close()


def test_a_forked_child_has_started_none_of_its_parents_processes(launch):
    with marks.marked():
        orphan, _ = launch()
        assert orphan in marks.started_by_me()
        pid = os.fork()
        if not pid:
            os._exit(0 if marks.started_by_me() == frozenset() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("before", [None, "", "17.4711"])
def test_the_variable_is_put_back(monkeypatch, before):
    if before is not None:
        monkeypatch.setenv(marks.VARIABLE, before)
    with marks.marked():
        assert os.environ[marks.VARIABLE] != before
    assert os.environ.get(marks.VARIABLE) == before


def test_a_run_inside_a_run_of_the_same_process_leaves_the_mark_of_the_outer_one():
    with marks.marked():
        outer = os.environ[marks.VARIABLE]
        with marks.marked():
            assert os.environ[marks.VARIABLE] == outer
        assert os.environ[marks.VARIABLE] == outer


@pytest.mark.parametrize("before", [None, "17.4711"])
@pytest.mark.parametrize("change", ["clear", "replace", "change"])
def test_a_test_may_change_the_environment(monkeypatch, before, change):
    if before is not None:
        monkeypatch.setenv(marks.VARIABLE, before)
    environ, kept = os.environ, dict(os.environ)
    try:
        with marks.marked():
            if change == "clear":
                os.environ.clear()
            elif change == "replace":
                os.environ = None  # noqa: B003
            else:
                os.environ[marks.VARIABLE] = "mine"
        assert environ.get(marks.VARIABLE) == before
    finally:
        os.environ = environ  # noqa: B003
        os.environ.update({name: value for name, value in kept.items() if name not in os.environ})
