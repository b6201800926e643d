"""The stacks of a process that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from pytest_vllm_cleanup.processes import proc, stacks

HANGING = """
import time
def a_function_that_hangs():
    print("up", flush=True)
    time.sleep(600)
a_function_that_hangs()
"""


@pytest.fixture
def hanging(tmp_path):
    started = []

    def start(errors, wanted=True):
        switch = stacks.printed_on_abort() if wanted else nullcontext()
        with switch:
            one = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=errors)
        started.append(one)
        one.stdout.readline()
        return one, proc.identify(one.pid)

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def test_the_stack_of_a_python_process_is_collected(hanging, tmp_path):
    with (tmp_path / "errors").open("wb") as errors:
        errors.write(b"written before\n")
        errors.flush()
        one, identity = hanging(errors)
    (tmp_path / "errors").unlink()  # as pytest's own capture file
    ((name, text),) = stacks.abort([identity])
    assert name.startswith(f"{one.pid} (")
    assert "in a_function_that_hangs" in text
    assert "written before" not in text
    assert one.wait(5) == -6


def test_a_process_that_writes_elsewhere_is_ended_all_the_same(hanging):
    one, identity = hanging(subprocess.DEVNULL)
    ((_, text),) = stacks.abort([identity])
    assert text == "(on its standard error)"
    assert one.wait(5) == -6


def test_a_process_without_faulthandler_prints_none(hanging, tmp_path):
    with (tmp_path / "errors").open("wb") as errors:
        _, identity = hanging(errors, wanted=False)
        assert stacks.abort([identity])[0][1] == "(it printed none)"


def test_it_leaves_no_memory_image(hanging, tmp_path):
    with (tmp_path / "errors").open("wb") as errors:
        one, identity = hanging(errors)
        stacks.abort([identity])
    assert not os.WCOREDUMP(os.waitpid(one.pid, 0)[1])
    one.returncode = -6


def test_the_users_own_switch_stays(monkeypatch):
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    with stacks.printed_on_abort():
        assert os.environ["PYTHONFAULTHANDLER"] == "0"
    assert os.environ["PYTHONFAULTHANDLER"] == "0"
    monkeypatch.delenv("PYTHONFAULTHANDLER")
    with stacks.printed_on_abort():
        assert os.environ["PYTHONFAULTHANDLER"] == "1"
    assert "PYTHONFAULTHANDLER" not in os.environ
