"""Locks that processes share: the waiting list, starts, ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack

import pytest
from filelock import Timeout
from packaging.version import Version

from pytest_vllm_cleanup.devices import leavers, patience, ports, starts
from pytest_vllm_cleanup.devices.board import Board
from pytest_vllm_cleanup.devices.caches import caches_of
from pytest_vllm_cleanup.devices.folder import FolderError, file_name, lock_folder
from pytest_vllm_cleanup.devices.starts import StartLocks

HOLDER = """
import sys, time
from pathlib import Path
from pytest_vllm_cleanup.devices import ports
from pytest_vllm_cleanup.devices.board import Board
from pytest_vllm_cleanup.devices.starts import StartLocks
folder = Path(sys.argv[1])
Board(folder).wait(["a"], exclusive=True)
with StartLocks(lambda: ["b", "a"], folder).starting():
    reserved = ports.reserve(folder)
    print(reserved.first, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which has device a alone, starts an engine on it, and has ports; with the lowest of these."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def listed(folder):
    """The processes on the waiting list."""
    return [claim["pid"] for claim in json.loads((folder / "turns.json").read_text())]


def test_what_another_process_has_is_waited_for_until_it_is_killed(other, tmp_path):
    process, _ = other
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(seconds)

    board = Board(tmp_path)
    assert listed(tmp_path) == [process.pid]
    board.wait(["a"], exclusive=False, sleep=sleep)
    assert len(sleeps) >= 3
    assert listed(tmp_path) == [os.getpid()]
    board.leave()
    assert listed(tmp_path) == []


def test_a_long_wait_for_a_turn_says_once_for_whom(other, tmp_path, capsys):
    process, sleeps = other[0], []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 400:
            process.kill()
            process.wait()

    Board(tmp_path).wait(["a"], exclusive=False, sleep=sleep)
    assert sum(sleeps) > 2 * patience.LONG
    [line] = capsys.readouterr().err.splitlines()
    assert f"process {os.getpid()} has waited 30 s for its turn on a" in line
    assert f"waiting for process {process.pid} (running, on a)" in line


def test_who_waits_enters_again_if_the_list_has_been_removed(other, tmp_path):
    board = Board(tmp_path)
    board.wait(["a"], exclusive=True, sleep=lambda _seconds: (tmp_path / "turns.json").unlink())
    assert listed(tmp_path) == [os.getpid()]


def test_who_gives_up_waiting_stands_in_nobodys_way(other, tmp_path):
    def interrupt(_seconds):
        raise KeyboardInterrupt

    board = Board(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        board.wait(["a"], exclusive=True, sleep=interrupt)
    assert listed(tmp_path) == [other[0].pid]


def test_a_list_that_cannot_be_read_is_begun_anew(tmp_path):
    (tmp_path / "turns.json").write_text("[{")
    board = Board(tmp_path)
    board.wait(["a"], exclusive=True)
    assert len(listed(tmp_path)) == 1


def is_free(folder, key="a"):
    """Whether another process could start an engine now, tried with locks of its own as such a one has."""
    lock = StartLocks(lambda: [key], folder)._lock(key)
    try:
        with lock.acquire(timeout=0):
            return True
    except Timeout:
        return False


def test_an_engine_starts_when_the_other_one_on_its_device_is_up_or_dead(other, tmp_path):
    process, _ = other
    with StartLocks(lambda: ["c"], tmp_path).starting():
        assert not is_free(tmp_path, "c")
    assert is_free(tmp_path, "c")
    started = time.monotonic()
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
    with StartLocks(lambda: ["a"], tmp_path).starting():
        assert time.monotonic() - started > 0.25
    killer.wait()


def test_a_start_that_waits_says_for_whom(tmp_path, monkeypatch, capsys):
    script = HOLDER.replace("sys.stdin.read()", "time.sleep(0.6)")
    environ = {**os.environ, "PYTEST_XDIST_WORKER": "gw7"}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        process.stdout.readline()
        monkeypatch.setattr(patience, "LONG", 0.1)
        with StartLocks(lambda: ["c"], tmp_path).starting() as waited:
            assert waited == ""
        with StartLocks(lambda: ["a"], tmp_path).starting() as waited:
            assert waited.endswith(f" s for process {process.pid} (gw7)")
    [line] = capsys.readouterr().err.splitlines()
    assert f"process {os.getpid()} has waited 0.1 s to start an engine on a" in line
    assert f"waiting for process {process.pid} (gw7)" in line


def test_an_engine_that_is_built_inside_another_one_waits_for_nobody(tmp_path, starter):
    locks = StartLocks(lambda: ["a", "b"], tmp_path)
    with locks.starting():
        starter()  # is next, and stands in nobody's way
        with locks.starting() as waited:
            assert waited == ""
        assert not is_free(tmp_path)


def test_a_forked_child_neither_takes_nor_gives_back_the_locks_of_its_parent(tmp_path):
    locks = StartLocks(lambda: ["a"], tmp_path)
    with locks.starting():
        child = os.fork()
        if child == 0:
            try:
                with locks.starting(), locks.closing():
                    pass
                locks.leave()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_an_engine_is_closed_when_the_other_one_on_its_device_is_up(other, tmp_path):
    # What is given back while vLLM measures makes its start fail.
    process, _ = other
    here, started = StartLocks(lambda: ["b", "a"], tmp_path), time.monotonic()
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
    with here.closing():
        assert time.monotonic() - started > 0.25
        with here.starting():
            pass  # this very process may build one meanwhile
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    killer.wait()


def test_an_engine_is_closed_all_the_same_when_the_other_one_takes_very_long(other, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(starts, "_CLOSING", 0.2)
    started = time.monotonic()
    with StartLocks(lambda: ["a", "b", "c"], tmp_path).closing():
        assert 0.2 <= time.monotonic() - started < 2
        assert not is_free(tmp_path, "c")  # what is free is taken
    assert other[0].poll() is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, device in zip(lines, "ab", strict=True):
        assert f"process {os.getpid()} has waited 0.2 s to give memory on {device} back" in line
        assert f"does so beside process {other[0].pid}" in line


STARTER = """
import sys, time
from pathlib import Path
from pytest_vllm_cleanup.devices.starts import StartLocks
print("up", flush=True)
with StartLocks(lambda: ["a"], Path(sys.argv[1])).starting():
    print("starts", flush=True)
    time.sleep(0.4)
"""


@pytest.fixture
def starter(tmp_path):
    """Returns a process that wants to start an engine on device a, which takes it 0.4 s."""
    with ExitStack() as stack:

        def start():
            command = [sys.executable, "-c", STARTER, str(tmp_path)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout.readline() == "up\n"
            time.sleep(0.1)  # it has its place by now
            return process

        yield start


def test_who_closes_an_engine_comes_before_all_who_start_one(tmp_path, starter):
    # Else it may wait for one start after the other, until it goes on beside one.
    waited = []

    def close():
        began = time.monotonic()
        with StartLocks(lambda: ["a"], tmp_path).closing():
            waited.append(time.monotonic() - began)

    with StartLocks(lambda: ["a"], tmp_path).starting():
        others = [starter() for _ in range(4)]
        closer = threading.Thread(target=close)
        closer.start()
        time.sleep(0.75)  # not when the others look, each half second
    closer.join()
    assert [process.stdout.read() for process in others] == ["starts\n"] * 4
    assert waited[0] < 1.1  # each start takes 0.4 s


def test_who_has_just_had_a_turn_does_not_take_the_next_one_from_those_who_wait(tmp_path, starter):
    here = StartLocks(lambda: ["a"], tmp_path)
    with here.closing():
        other = starter()
    with here.starting() as waited:  # at once, while the other one looks each half second
        assert f" for process {other.pid}" in waited
        assert other.stdout.readline() == "starts\n"


def test_who_gives_up_being_next_lets_others_start(tmp_path):
    with StartLocks(lambda: ["a"], tmp_path).closing():
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt), StartLocks(lambda: ["a"], tmp_path).starting():
            pytest.fail("it was not its turn")
    with StartLocks(lambda: ["a"], tmp_path).starting() as waited:
        assert waited == ""


LEAVER = """
import ctypes, gc, sys, time
from pathlib import Path
from pytest_vllm_cleanup.devices.starts import StartLocks

class Last:
    def __del__(self, sleep=time.sleep):
        print("last", flush=True)
        sleep(1)

gc.kept = [Last()]
sys.modules["kept"] = gc
StartLocks(lambda: ["a", "b"], Path(sys.argv[1])).leave()
print("leaves", flush=True)
sys.stdin.read()
if sys.argv[2] == "hangs":
    library = ctypes.CDLL(None)
    library.__cxa_atexit(library.pause, None, None)
"""


@pytest.fixture
def leaver(tmp_path):
    """Returns a process that leaves when its input is closed, and says when Python is about to let it go."""
    with ExitStack() as stack:

        def start(how):
            command = [sys.executable, "-c", LEAVER, str(tmp_path), how]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout.readline() == "leaves\n"
            return process

        yield start


def test_nobody_starts_an_engine_until_those_who_leave_have_ended(tmp_path, leaver):
    # Their CUDA contexts are given back after Python has let all of its objects go.
    one, other = leaver("ends"), leaver("ends")
    with StartLocks(lambda: ["a"], tmp_path).closing():
        pass  # they stand in nobody else's way
    one.kill()
    other.stdin.close()
    assert other.stdout.readline() == "last\n"
    started = time.monotonic()
    with StartLocks(lambda: ["b"], tmp_path).starting():
        assert 0.7 < time.monotonic() - started < 5
        assert other.wait(0.1) == 0  # not a moment before it has ended


def test_who_hangs_while_it_leaves_is_not_waited_for_for_ever_and_only_once(tmp_path, leaver, monkeypatch):
    monkeypatch.setattr(leavers, "_LIMIT", 2.0)
    started = time.monotonic()
    process = leaver("hangs")
    process.stdin.close()
    locks = StartLocks(lambda: ["a"], tmp_path)
    with locks.starting():
        assert 1.9 < time.monotonic() - started < 5
    started = time.monotonic()
    with locks.starting():
        assert time.monotonic() - started < 0.5
    assert process.poll() is None


def test_who_leaves_does_not_wait_for_itself(tmp_path):
    locks = StartLocks(lambda: ["a"], tmp_path)
    locks.leave()
    started = time.monotonic()
    with locks.starting():
        assert time.monotonic() - started < 0.5


def test_nobody_leaves_while_an_engine_starts(other, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(starts, "_CLOSING", 0.4)
    monkeypatch.setattr(patience, "LONG", 0.2)
    started = time.monotonic()
    StartLocks(lambda: ["a", "c"], tmp_path).leave()
    assert 0.4 <= time.monotonic() - started < 2
    long, at_last = capsys.readouterr().err.splitlines()
    assert "has waited 0.2 s to give memory on a back, and goes on waiting for process" in long
    assert f"does so beside process {other[0].pid}" in at_last
    assert is_free(tmp_path, "c")


def test_who_is_interrupted_before_it_may_leave_gives_back_what_it_has(other, tmp_path):
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        StartLocks(lambda: ["a", "b", "A"], tmp_path).leave()
    assert is_free(tmp_path, "A")
    assert other[0].poll() is None


def test_each_process_has_a_range_of_ports_of_its_own(other, tmp_path):
    mine, more = ports.reserve(tmp_path), ports.reserve(tmp_path)
    assert len({mine.first, more.first, other[1]}) == 3
    assert all(abs(mine.first - first) >= ports.BLOCK for first in (more.first, other[1]))


def test_when_all_ranges_are_taken_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "BLOCKS", 2)
    held = [ports.reserve(tmp_path) for _ in range(3)]
    assert held[2] is None
    del held[0]
    assert ports.reserve(tmp_path) is not None


def test_the_variables_lead_into_the_range_and_not_where_vllm_would_look_for_ever(tmp_path):
    reserved = ports.reserve(tmp_path)
    names = reserved.environment(Version("0.32.0"))
    assert sorted(names) == ["MASTER_PORT", "VLLM_DP_MASTER_PORT", "VLLM_PORT"]
    numbers = sorted(map(int, names.values()))
    assert reserved.first == numbers[0]
    assert numbers[-1] + 10 < reserved.first + ports.BLOCK
    assert "VLLM_PORT" not in reserved.environment(Version("0.17.1"))
    assert reserved.environment(None) == names
    assert ports.FIRST + ports.BLOCK * ports.BLOCKS < 29500


def test_the_folder_is_this_users_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = lock_folder()
    assert folder == lock_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(FolderError, match="set TMPDIR to another place"):
        lock_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(FolderError, match="is not a folder of this user alone"):
        lock_folder()


def test_a_lock_is_named_after_its_device():
    assert file_name("start", "GPU-aaaa-1") == "start-GPU-aaaa-1.lock"
    assert file_name("start", "MIG-GPU-a/1/0") == "start-MIG-GPU-a_1_0.lock"


def test_caches_of_a_worker_are_below_those_that_all_would_share():
    found = caches_of(1, {"HOME": "/home/me", "VLLM_CACHE_ROOT": "~/vllm", "TRITON_CACHE_DIR": "/fast/triton"})
    assert found["VLLM_CACHE_ROOT"].endswith("/vllm/worker-1")
    assert found["TRITON_CACHE_DIR"] == "/fast/triton/worker-1"
    assert found["TORCHINDUCTOR_CACHE_DIR"].endswith("/worker-1")
    assert caches_of(0, {"HOME": "/h", "XDG_CACHE_HOME": "/x"})["VLLM_CACHE_ROOT"] == "/x/vllm/worker-0"
    assert caches_of(0, {"HOME": "/h"})["VLLM_CACHE_ROOT"] == "/h/.cache/vllm/worker-0"
