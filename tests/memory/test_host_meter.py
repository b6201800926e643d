from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from pytest_vllm_cleanup.memory.meters import host
from pytest_vllm_cleanup.memory.meters.host import HostMeter

MIB = 1 << 20
NOBODY = frozenset()
NEEDS_SHARES = pytest.mark.skipif(
    "Pss_Anon" not in Path("/proc/self/smaps_rollup").read_text(encoding="ascii"), reason="needs Linux 5.4"
)
HOLD = "import sys; held = bytearray(b'x' * (int(sys.argv[1]) << 20)); print('up', flush=True); sys.stdin.read()"


@contextmanager
def child(mib):
    """A process that holds so much until it is let go."""
    command = [sys.executable, "-c", HOLD, str(mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.stdin.close()


def read(ours=NOBODY):
    return HostMeter().read(ours)["host"]


def test_what_this_process_takes_and_gives_back_is_seen():
    before = read().own
    held = bytearray(b"x" * (64 * MIB))
    during = read().own
    del held
    after = read().own
    assert 60 * MIB < during - before < 80 * MIB
    assert abs(after - before) < 8 * MIB


def test_free_memory_in_a_fragmented_heap_is_handed_back_to_the_machine():
    before = read().own
    held = [bytes(1000) for _ in range(60_000)]
    during = read().own
    assert during - before > 40 * MIB
    # The newest stays, so that the allocator cannot shorten its heap by itself.
    newest = held[-1]
    del held
    assert read().own - before < 20 * MIB
    del newest


@pytest.mark.parametrize("on_disk", [True, False])
def test_pages_of_a_mapped_file_do_not_count(tmp_path, on_disk):
    # Torch's libraries are such pages: who else maps them decides whether the USS has them. They are dirty until they
    # have been written to disk; when that happened beside a leak, the figure fell by 60 MiB and hid it.
    file = tmp_path / "library"
    with file.open("wb") as opened:
        opened.write(b"x" * (64 * MIB))
        if on_disk:
            os.fsync(opened.fileno())
    before, uss_before = read().own, psutil.Process().memory_full_info().uss
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as pages:
        assert sum(pages[offset] for offset in range(0, len(pages), 4096)) > 0
        assert psutil.Process().memory_full_info().uss - uss_before > 32 * MIB
        assert read().own - before < 8 * MIB


def test_children_are_counted_apart_until_they_end():
    before = read()
    with child(64):
        during = read()
    after = read()
    assert during.children - before.children > 60 * MIB
    assert during.own - before.own < 20 * MIB
    assert during.used == during.own + during.children
    assert after.children == before.children


def test_the_machine_and_the_processes_are_named():
    reading = read()
    assert (reading.device, reading.meters, reading.total) == (
        "host",
        ("host",),
        psutil.virtual_memory().total,
    )
    assert (reading.others, reading.allocated, reading.reserved) == (None, None, None)
    assert [(use.pid, use.ours) for use in reading.processes if use.pid == os.getpid()] == [(os.getpid(), True)]


def test_a_registered_process_that_is_no_descendant_counts():
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {HOLD!r}, '32'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True); p.stdout.readline(); "
        "print(p.pid, flush=True); import os; sys.stdin.read(); p.kill(); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        grandchild = int(parent.stdout.readline())
        listed = [use.pid for use in read(frozenset({grandchild, parent.pid})).processes]
        parent.stdin.close()
    # Once each, whether found as descendant or by registration.
    assert sorted(listed) == sorted(set(listed))
    assert grandchild in listed


def test_processes_that_have_ended_count_for_nothing():
    with child(8) as process:
        pass
    reading = read(frozenset({process.pid, 2**22 + 1}))
    assert process.pid not in [use.pid for use in reading.processes]


def test_a_zombie_counts_for_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        reading = read()
        assert process.pid not in [use.pid for use in reading.processes]
        assert reading.children is not None
    finally:
        process.wait()


def test_pythons_own_helper_for_shared_memory_is_no_child_of_ours():
    resource_tracker.ensure_running()
    helper = resource_tracker._resource_tracker._pid
    assert helper in [process.pid for process in psutil.Process().children()]
    assert helper not in [use.pid for use in read().processes]


def test_the_helper_that_outlives_pytest_is_no_child_of_ours():
    from pytest_vllm_cleanup.processes.watchdog import Watchdog

    watchdog = Watchdog()
    watchdog.ensure()
    try:
        assert watchdog.pid in [process.pid for process in psutil.Process().children()]
        assert watchdog.pid not in [use.pid for use in read(frozenset({watchdog.pid})).processes]
    finally:
        watchdog.close()


@NEEDS_SHARES
def test_a_fork_changes_nothing_and_what_is_taken_beside_the_child_is_seen():
    held = bytearray(b"x" * (64 * MIB))
    before = read()
    context = multiprocessing.get_context("fork")
    done = context.Event()
    process = context.Process(target=done.wait)
    process.start()
    try:
        beside = read()
        more = bytearray(b"x" * (32 * MIB))
        later = read()
    finally:
        done.set()
        process.join()
    assert abs(beside.used - before.used) < 16 * MIB
    assert beside.own < before.own - 24 * MIB  # half of it is the child's now
    assert abs(later.used - beside.used - 32 * MIB) < 8 * MIB
    assert len(held) + len(more) == 96 * MIB


def test_shared_memory_without_a_file_counts():
    before = read().own
    with mmap.mmap(-1, 64 * MIB) as pages:
        pages.write(b"x" * (64 * MIB))
        assert 60 * MIB < read().own - before < 80 * MIB
    assert abs(read().own - before) < 8 * MIB


@NEEDS_SHARES
def test_what_an_allocator_has_handed_back_does_not_count_nor_hide_what_is_held_beside_a_fork():
    held = bytearray(b"x" * (64 * MIB))
    before = read().used
    with mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * (96 * MIB))
        pages.madvise(mmap.MADV_FREE)
        assert abs(read().used - before) < 8 * MIB
        context = multiprocessing.get_context("fork")
        done = context.Event()
        process = context.Process(target=done.wait)
        process.start()
        try:
            assert abs(read().used - before) < 24 * MIB
        finally:
            done.set()
            process.join()
    assert len(held) == 64 * MIB


def test_a_child_that_may_not_be_read_makes_the_children_unknown(monkeypatch):
    with child(8) as process:
        readable = host._written_bytes

        def refuse(other):
            if other.pid == process.pid:
                raise psutil.AccessDenied(other.pid)
            return readable(other)

        monkeypatch.setattr(host, "_written_bytes", refuse)
        reading = read()
    assert (reading.children, reading.used) == (None, None)
    assert reading.own > 0


def test_without_the_figure_the_meter_says_why(monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(host, "_written_bytes", refuse)
    meter = HostMeter()
    assert meter.read(NOBODY)["host"].own is None
    assert "may not be read" in meter.reason


@pytest.mark.parametrize("missing", ["malloc_trim", "everything"])
def test_a_machine_without_glibc_is_read_as_well(monkeypatch, missing):
    import ctypes

    def library(_name):
        if missing == "everything":
            raise OSError("no such handle")
        return object()

    monkeypatch.setattr(ctypes, "CDLL", library)
    assert read().own > 0
