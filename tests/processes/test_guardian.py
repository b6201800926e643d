"""The helper process from the inside: what it is told, what it answers, when it acts."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest
from programs import FAMILY, GROWING, PATIENT, STUBBORN

from pytest_vllm_cleanup.processes import guardian, proc
from pytest_vllm_cleanup.processes.guardian import Guardian


class Session:
    """A guardian in a thread of this process, which takes this process's parent for the one it guards."""

    def __init__(self, parent: int) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(5)
        self.guardian = Guardian(theirs, parent)
        self.left = []
        self.thread = threading.Thread(target=lambda: self.left.append(self.guardian.serve()))
        self.thread.start()

    def say(self, **message):
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def add(self, engine, *processes):
        self.say(say="add", engine=engine, processes=[[each.pid, each.started] for each in processes])

    def known(self, engine):
        self.say(say="tell", engine=engine)
        return {tuple(process) for process in json.loads(self.connection.makefile().readline())}

    def end(self):
        self.say(say="leave")
        self.thread.join(5)
        return self.left


@pytest.fixture(params=["descriptor", "polling"])
def session(request, monkeypatch):
    if request.param == "polling":
        monkeypatch.delattr(os, "pidfd_open")
    made = Session(os.getppid())
    yield made
    if made.thread.is_alive():
        made.end()
    made.connection.close()


def test_it_knows_what_it_was_told_and_what_these_have_started(session, start):
    one, other = start(FAMILY), start(PATIENT)
    session.add(1, one.identity)
    session.add(2, other.identity)
    child = proc.identify(int(one.line))
    assert session.known(1) == {(one.identity.pid, one.identity.started), (child.pid, child.started)}
    assert session.known(2) == {(other.identity.pid, other.identity.started)}
    assert session.known(3) == set()


def test_it_remembers_a_child_whose_parent_has_died_since(session, start, monkeypatch):
    monkeypatch.setattr(guardian, "_LOOK", 0.05)
    one = start(GROWING)
    session.add(1, one.identity)
    one.popen.stdin.write("\n")
    one.popen.stdin.flush()
    child = proc.identify(int(one.popen.stdout.readline()))
    time.sleep(1.5)  # it looks once a second, and nobody asks
    one.popen.kill()
    one.popen.wait()
    assert session.known(1) == {(child.pid, child.started)}
    os.kill(child.pid, 9)


def test_it_forgets_an_engine_that_is_closed(session, start):
    one = start()
    session.add(1, one.identity)
    session.say(say="forget", engine=1)
    assert session.known(1) == set()


def test_a_farewell_ends_it_without_an_order_to_act(session):
    assert session.end() == [False]


def test_a_closed_connection_alone_ends_nothing(start, monkeypatch):
    parent = start()
    monkeypatch.setattr(os, "getppid", lambda: parent.identity.pid)
    session = Session(parent.identity.pid)
    session.connection.shutdown(socket.SHUT_WR)
    session.thread.join(0.5)
    assert session.left == []
    parent.popen.kill()
    session.thread.join(5)
    assert session.left == [True]
    session.connection.close()


def test_it_acts_when_its_parent_is_another_than_the_one_it_guards():
    session = Session(os.getppid() + 1)
    session.thread.join(5)
    assert session.left == [True]


def told(*processes):
    ours, theirs = socket.socketpair()
    made = Guardian(theirs, os.getppid())
    made._engines = {number: {each.identity} for number, each in enumerate(processes)}
    ours.close()
    return made


def test_it_asks_once_and_waits(start, monkeypatch):
    one, bystander = start(), start()
    ended = told(one).end_all()
    assert one.popen.wait(5) == -15
    assert [text.split()[0] for text in ended] == [str(one.identity.pid)]
    assert bystander.popen.poll() is None


def test_it_kills_what_does_not_go(start, monkeypatch):
    monkeypatch.setattr(guardian, "_GRACE", 0.3)
    one = start(STUBBORN)
    told(one).end_all()
    assert one.popen.wait(5) == -9


def test_children_are_left_to_their_parents_before_they_are_killed(start, monkeypatch):
    monkeypatch.setattr(guardian, "_GRACE", 0.3)
    one = start(FAMILY)
    child = proc.identify(int(one.line))
    assert len(told(one).end_all()) == 2
    assert one.popen.wait(5) == -15
    assert not proc.is_running(child)


def test_it_does_nothing_where_nothing_is_left(start):
    one = start()
    one.popen.kill()
    one.popen.wait()
    assert told(one).end_all() == []
