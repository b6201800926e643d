"""Memory of another process: found there, copied from there, or refused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_vllm_cleanup.isolation import neighbour_memory
from pytest_vllm_cleanup.isolation.neighbour_memory import Part, Place, locate, read, split

from .refusal import refuse_to_read

NEIGHBOUR = """
import pickle, sys
from pytest_vllm_cleanup.isolation.neighbour_memory import locate

pattern = bytes(range(251)) * 150_000  # more than two parts; no part looks like another
pieces = [pattern, b"abc", bytearray(pattern[1:]), memoryview(bytearray(pattern[2:])), memoryview(pattern)[3:]]
sys.stdout.buffer.write(pickle.dumps(locate(pieces)))
sys.stdout.buffer.close()
sys.stdin.read()
"""
PATTERN = bytes(range(251)) * 150_000


@pytest.fixture
def neighbour():
    """A process and where it has its pieces."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process, pickle.load(process.stdout)
    process.communicate()


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([0], []),
        ([1], [(0, 0, 1)]),
        ([4], [(0, 0, 4)]),
        ([5, 0, 8], [(0, 0, 4), (0, 4, 1), (2, 0, 4), (2, 4, 4)]),
    ],
)
def test_pieces_are_split_into_parts_that_cover_them(sizes, parts):
    assert list(split(sizes, 4)) == [Part(*part) for part in parts]


def test_pieces_of_a_process_are_copied_whole_and_of_their_kind(neighbour):
    process, places = neighbour
    assert [(place.size, place.kind) for place in places] == [
        (len(PATTERN), "bytes"),
        (3, "bytes"),
        (len(PATTERN) - 1, "bytearray"),
        (len(PATTERN) - 2, "memory"),
        (len(PATTERN) - 3, "memory"),  # from the start of the view, not of what it is a view of
    ]
    pieces = read(process.pid, places)
    assert [type(piece) for piece in pieces] == [bytes, bytes, bytearray, memoryview, memoryview]
    assert [bytes(piece) for piece in pieces] == [PATTERN, b"abc", PATTERN[1:], PATTERN[2:], PATTERN[3:]]
    assert hash(pieces[0]) == hash(PATTERN)
    for writable in pieces[2:]:
        writable[0] = 77
        assert writable[0] == 77
    assert [bytes(piece) for piece in read(process.pid, places)][2:] == [PATTERN[1:], PATTERN[2:], PATTERN[3:]]


def test_memory_is_aligned_and_a_fork_does_not_write_to_that_of_its_parent():
    here = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    (copied,) = read(os.getpid(), locate([memoryview(here)[5:]]))
    (place,) = locate([copied])
    assert place.address % mmap.PAGESIZE == 0
    child = os.fork()
    if not child:
        copied[0] = 77
        os._exit(0)
    os.waitpid(child, 0)
    assert copied[0] == 0


def test_where_a_system_reads_less_than_it_was_asked_for_the_rest_is_read_too(monkeypatch):
    library = ctypes.CDLL(None, use_errno=True)
    asked = []

    class Part:
        """The real call, of 1000 bytes at most."""

        def __call__(self, pid, here, one, there, other, flags):
            asked.append(here._obj.size)
            here._obj.size = there._obj.size = min(1000, here._obj.size)
            function = library.process_vm_readv
            function.restype = ctypes.c_ssize_t
            return function(pid, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: type("Library", (), {"process_vm_readv": Part()})())
    data = PATTERN[:2500]
    assert read(os.getpid(), locate([data])) == [data]
    assert asked == [2500, 1500, 500]


def test_several_threads_copy_and_are_gone_afterwards(neighbour, monkeypatch):
    process, places = neighbour
    seen = set()
    both = threading.Barrier(2, timeout=10)
    copy = neighbour_memory._read_memory

    def watched(*arguments):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            if len(seen) <= 2:
                both.wait()  # the first one waits for another one to come along
        copy(*arguments)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(neighbour_memory, "_read_memory", watched)
    before = threading.active_count()
    read(process.pid, places)
    assert len(seen) == 2
    assert threading.get_ident() not in seen
    assert threading.active_count() == before


def test_what_cannot_be_read_is_an_error_with_its_number(neighbour):
    process, places = neighbour
    with pytest.raises(OSError, match="reading the memory of process") as caught:
        read(process.pid, [Place(mmap.PAGESIZE, 3, "bytes")])  # nothing is there
    assert caught.value.errno == errno.EFAULT
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        read(process.pid, places)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_system_that_does_not_allow_it_is_an_error_with_its_number(number):
    with ThreadPoolExecutor(1, initializer=refuse_to_read, initargs=(number,)) as pool:
        with pytest.raises(OSError, match="reading the memory of process") as caught:
            pool.submit(read, os.getpid(), locate([b"abc"])).result()
        assert caught.value.errno == number
