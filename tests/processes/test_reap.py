"""Ending exactly these processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from programs import FAMILY, GROWING, PATIENT, STUBBORN

from pytest_vllm_cleanup.processes import proc, reap, tree


@pytest.fixture(params=["by descriptor", "by number"])
def kernel(request, monkeypatch):
    """With and without descriptors of processes, which some kernels lack."""
    if request.param == "by number":
        monkeypatch.delattr(os, "pidfd_open")
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("no such descriptors here")


def test_a_signal_reaches_its_process(kernel, start):
    one = start()
    assert reap.send(one.identity, signal.SIGTERM)
    assert one.popen.wait(5) == -signal.SIGTERM


def test_a_recycled_number_gets_no_signal(kernel, start):
    one = start()
    assert not reap.send(replace(one.identity, started=one.identity.started - 100), signal.SIGKILL)
    time.sleep(0.1)
    assert one.popen.poll() is None


def test_one_that_is_gone_gets_no_signal(kernel, start):
    one = start()
    one.popen.kill()
    one.popen.wait()
    assert not reap.send(one.identity, signal.SIGKILL)


def test_waiting_ends_with_the_last_process(start):
    one = start()
    family = reap.Family([one.identity])
    one.popen.kill()
    begun = time.monotonic()
    assert reap.wait(family, 5) == frozenset()
    assert time.monotonic() - begun < 1


def test_waiting_gives_up_and_says_who_is_left(start):
    one = start(STUBBORN)
    reap.send(one.identity, signal.SIGTERM)
    assert reap.wait(reap.Family([one.identity]), 0.2) == {one.identity}


def test_what_is_started_while_waiting_belongs_to_the_family(start):
    one = start(GROWING)
    family = reap.Family([one.identity])
    assert family() == {one.identity}
    one.popen.stdin.write("\n")
    one.popen.stdin.flush()
    child = proc.identify(int(one.popen.stdout.readline()))
    assert family() == {one.identity, child}
    one.popen.kill()
    one.popen.wait()
    assert family() == {child}
    reap.send_all(family(), signal.SIGKILL)
    assert reap.wait(family, 5) == frozenset()


def test_only_the_named_processes_get_the_signal(start):
    one, other, bystander = start(FAMILY), start(PATIENT), start(PATIENT)
    reap.send_all(tree.family([one.identity, other.identity]), signal.SIGKILL)
    assert (one.popen.wait(5), other.popen.wait(5)) == (-9, -9)
    assert bystander.popen.poll() is None
