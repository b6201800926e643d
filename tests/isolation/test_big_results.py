"""Big results of run_isolated: read from the memory of their process, or written to a file where that is refused."""

from __future__ import annotations

import errno
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_vllm_cleanup import EngineCleanupWarning, IsolatedProcessError, IsolatedTimeoutError, run_isolated
from pytest_vllm_cleanup.isolation import cargo, errand, neighbour_memory

from .refusal import refuse_to_read
from .runs import gone

BIG = 2**20  # bytes, from which a piece goes by itself


@pytest.fixture(params=["read", "written"])
def call(request):
    """run_isolated, where the memory of its process may be read, and where it must not."""
    if request.param == "read":
        yield run_isolated
        return
    run_isolated(int)  # starts the watchdog's helper, outside the thread that must not read
    with ThreadPoolExecutor(1, initializer=refuse_to_read, initargs=(errno.EPERM,)) as pool:
        yield lambda *arguments, **options: pool.submit(run_isolated, *arguments, **options).result()


def pattern(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class Named(bytes):
    """Bytes that have an attribute."""


def plain():
    data = pattern(3 * BIG)
    named = Named(pattern(BIG))
    named.name = "named"
    sizes = {size: pattern(size) for size in (0, 1, BIG - 1, BIG, BIG + 1)}
    arrays = {size: bytearray(pattern(size)) for size in sizes}
    return {"data": data, "again": [(data,)], "named": named, "text": "é" * BIG, "sizes": sizes, "arrays": arrays}


def test_bytes_come_as_they_were_and_the_same_object_stays_the_same(call):
    result = call(plain)
    expected = plain()
    assert result == expected
    assert result["again"][0][0] is result["data"]
    assert type(result["data"]) is bytes
    assert type(result["named"]) is Named
    assert result["named"].name == "named"
    assert {type(data) for data in result["sizes"].values()} == {bytes}
    assert {type(data) for data in result["arrays"].values()} == {bytearray}
    result["arrays"][BIG][0] = 77
    result["arrays"][BIG] += b"more"  # its size may change
    assert result["arrays"][BIG + 1] == expected["arrays"][BIG + 1]


def arrays():
    import numpy

    plain = numpy.arange(BIG, dtype="u4")
    fixed = numpy.arange(BIG, dtype="f8")
    fixed.flags.writeable = False
    of_bytes = numpy.frombuffer(pattern(2 * BIG), dtype="u1")[5:]
    fortran = numpy.asfortranarray(numpy.arange(BIG).reshape(1024, -1))
    small, empty = numpy.arange(5), numpy.empty((0, 3))
    strided, objects = numpy.arange(BIG)[::2], numpy.array([None, pattern(BIG)], dtype=object)
    found = {"plain": plain, "again": [plain], "fixed": fixed, "of_bytes": of_bytes, "fortran": fortran}
    return {**found, "small": small, "empty": empty, "strided": strided, "objects": objects}


def test_arrays_come_as_they_were_each_with_memory_of_its_own(call):
    numpy = pytest.importorskip("numpy")
    result = call(arrays)
    expected = arrays()
    assert result.keys() == expected.keys()
    for name in expected.keys() - {"again"}:
        assert numpy.array_equal(result[name], expected[name]), name
        assert result[name].dtype == expected[name].dtype, name
    assert result["again"][0] is result["plain"]
    assert result["fortran"].flags.f_contiguous
    assert {name for name in expected if name != "again" and not result[name].flags.writeable} == {"fixed", "of_bytes"}
    assert all(result[name].ctypes.data % 64 == 0 for name in ("plain", "fixed", "fortran"))
    result["plain"][:] = 7
    assert numpy.array_equal(result["fortran"], expected["fortran"])
    assert numpy.array_equal(result["fixed"], expected["fixed"])


def tensors():
    import torch

    tensor = torch.arange(BIG)
    complex_ones = torch.ones(BIG, dtype=torch.complex64)
    return {
        "tensor": tensor,
        "part": tensor[5:],
        "half": torch.ones(BIG, dtype=torch.bfloat16),
        "turned": torch.arange(BIG).reshape(1024, -1).t(),
        "conjugated": complex_ones.conj(),
        "parameter": torch.nn.Parameter(torch.ones(BIG)),
        "sparse": torch.eye(1000).to_sparse(),
        "again": [tensor],
    }


def test_tensors_come_as_they_were_and_can_be_written_to(call):
    torch = pytest.importorskip("torch")
    result = call(tensors)
    expected = tensors()
    assert torch.equal(result.pop("sparse").to_dense(), expected.pop("sparse").to_dense())
    for name in expected.keys() - {"again"}:
        ours, theirs = result[name], expected[name]
        assert torch.equal(ours, theirs)
        assert (type(ours), ours.dtype, ours.stride(), ours.requires_grad) == (
            type(theirs),
            theirs.dtype,
            theirs.stride(),
            theirs.requires_grad,
        )
    assert result["again"][0] is result["tensor"]
    result["tensor"][0] = 77
    assert result["again"][0][0] == 77


class Problem(Exception):
    """An error that knows what it was about."""


def fail():
    import numpy

    problem = Problem("with much to tell")
    problem.data = pattern(2 * BIG), bytearray(pattern(2 * BIG)), numpy.arange(BIG)
    raise problem


def test_an_exception_brings_its_big_attributes(call):
    pytest.importorskip("numpy")
    with pytest.raises(Problem, match="with much to tell") as caught:
        call(fail)
    data, array, numbers = caught.value.data
    assert data == array == pattern(2 * BIG)
    assert (type(data), type(array)) == (bytes, bytearray)
    assert numbers.tolist() == list(range(BIG))
    assert "raise problem" in str(caught.value.__cause__)


def without_files():
    import numpy

    resource.setrlimit(resource.RLIMIT_FSIZE, (BIG // 4, BIG // 4))  # files in memory have this limit too
    data = pattern(4 * BIG)
    return [data, bytearray(data), {"deep": (numpy.frombuffer(data, dtype="u1") + numpy.uint8(0), data[1:])}]


def test_what_may_be_read_is_written_to_no_file():
    pytest.importorskip("numpy")
    data, array, deep = run_isolated(without_files)
    assert data == array == deep["deep"][0].tobytes() == pattern(4 * BIG)
    assert deep["deep"][1] == data[1:]


def test_where_no_thread_can_be_started_the_file_is_used(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert run_isolated(pattern, 2 * BIG) == pattern(2 * BIG)


# What happens between the answer and its arrival


def resized():
    """Return what is emptied, if that can be, when its place has been told."""
    locate = neighbour_memory.locate
    data = bytearray(pattern(2 * BIG))

    def then_empty(pieces):
        places = locate(pieces)
        with suppress(BufferError):
            data.clear()
        return places

    neighbour_memory.locate = then_empty
    return data


def test_a_bytearray_cannot_be_resized_while_it_is_read(call):
    assert call(resized) == pattern(2 * BIG)


def meanwhile(monkeypatch, do):
    """Have something done when the caller is about to read; as what it does with the process's number."""
    read = neighbour_memory.read

    def late(pid, places):
        do(pid)
        return read(pid, places)

    monkeypatch.setattr(errand.neighbour_memory, "read", late)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_process_that_dies_before_its_result_is_read_is_told(monkeypatch):
    meanwhile(monkeypatch, kill)
    started = time.monotonic()
    with pytest.raises(
        IsolatedProcessError,
        match=r"was killed by SIGKILL after the function had returned, and before all of its result was here.*memory",
    ) as caught:
        run_isolated(pattern, 2 * BIG)
    assert caught.value.returncode == -signal.SIGKILL
    assert time.monotonic() - started < 10


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    raise PermissionError(errno.EPERM, "not allowed")


def test_a_process_that_somebody_stops_is_not_waited_for_without_end(monkeypatch):
    meanwhile(monkeypatch, stop)
    monkeypatch.setattr(errand, "_WRITING", 1.0)
    started = time.monotonic()
    with pytest.raises(IsolatedTimeoutError, match=r"it has returned, but its result was not here after 1 s more"):
        run_isolated(pattern, 2 * BIG)
    assert time.monotonic() - started < 30


def test_a_process_that_dies_when_its_result_has_been_read_has_given_it(monkeypatch):
    read = neighbour_memory.read

    def then_kill(pid, places):
        pieces = read(pid, places)
        kill(pid)
        return pieces

    monkeypatch.setattr(errand.neighbour_memory, "read", then_kill)
    with pytest.warns(EngineCleanupWarning, match="was killed by SIGKILL while it closed its engines"):
        assert run_isolated(pattern, 2 * BIG) == pattern(2 * BIG)


def test_ctrl_c_while_the_process_waits_ends_it_in_order(monkeypatch):
    pids = []

    def interrupt(pid):
        pids.append(pid)
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile(monkeypatch, interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_isolated(pattern, 2 * BIG)
    assert time.monotonic() - started < 5, "it was ended by force"
    assert not gone(pids)


def test_the_time_that_a_copy_takes_is_not_the_function_s(monkeypatch):
    meanwhile(monkeypatch, lambda pid: time.sleep(3.2))
    assert run_isolated(pattern, 2 * BIG, timeout=3) == pattern(2 * BIG)


def test_a_caller_that_is_killed_leaves_no_process_that_waits_for_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os
            from pytest_vllm_cleanup import run_isolated
            from pytest_vllm_cleanup.isolation import errand

            def die(pid, places):
                print(pid, flush=True)
                os.kill(os.getpid(), 9)

            errand.neighbour_memory.read = die
            run_isolated(bytes, 2**21)
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        output, errors = caller.communicate(timeout=60)
    assert caller.returncode == -signal.SIGKILL
    assert errors == ""
    assert not gone([int(output)], 10)


def size_when_done():
    """Return much, and note how much memory the process has when its engines are closed."""
    from pytest_vllm_cleanup.isolation import callee

    watchdog = callee.current_watchdog

    def note():
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        print(int(line.split()[1]) // 1024, "MiB")
        return watchdog()

    callee.current_watchdog = note
    return b"x" * 500 * BIG, [bytearray(b"y") * 100 * BIG]


def test_a_process_has_given_its_result_away_when_it_closes_its_engines(call, capfd):
    call(size_when_done)
    size, unit = capfd.readouterr().out.split()
    assert unit == "MiB"
    assert int(size) < 300


def resizable():
    import torch

    table = torch.ones(BIG)
    return {"table": table, "rows": list(table.reshape(16, -1)), "pair": (table[:5], table[5:])}


def test_tensors_share_memory_as_before_and_can_be_resized(call):
    pytest.importorskip("torch")
    result = call(resizable)
    assert (
        len({tensor.untyped_storage().data_ptr() for tensor in (result["table"], *result["rows"], *result["pair"])})
        == 1
    )
    result["rows"][0][0] = 5
    assert result["table"][0] == 5
    assert result["table"].resize_(2 * BIG).shape == (2 * BIG,)


SIZES = (2**16 - 1, 2**16, 2**16 + 1, BIG - 1, BIG, BIG + 1)  # a pickler does otherwise from 64 KiB on


def arrays_of_all_sizes():
    import numpy

    made = [numpy.full(size, 7, dtype=numpy.uint8) for size in SIZES]
    for array in made[::2]:
        array.flags.writeable = False
    return made, [pickle.PickleBuffer(bytes(size)) for size in SIZES]


def test_buffers_of_all_sizes_come(call):
    numpy = pytest.importorskip("numpy")
    arrays, buffers = call(arrays_of_all_sizes)
    assert [len(array) for array in arrays] == [len(buffer) for buffer in buffers] == list(SIZES)
    assert all((array == 7).all() for array in arrays)
    assert isinstance(arrays[0], numpy.ndarray)


class Pool:
    """Has memory that is somebody else's when it is gone, whoever looks at it."""

    def __init__(self):
        self.memory = bytearray(pattern(BIG))

    def __del__(self):
        self.memory[:] = bytes(BIG)

    def view(self):
        return pickle.PickleBuffer(self.memory)


class Window(Pool):
    """Goes as a look at its memory."""

    def __reduce__(self):
        return bytes, (self.view(),)


class PoolError(Exception):
    def __init__(self, pool):
        super().__init__(pool)


def raise_a_pool():
    raise PoolError(Window())


def test_who_owns_the_memory_of_a_result_lives_until_it_is_here(call):
    assert call(Window) == pattern(BIG)
    assert call(Pool().view) == pattern(BIG)  # it goes as what this is a method of
    with pytest.raises(PoolError) as caught:
        call(raise_a_pool)
    assert caught.value.args == (pattern(BIG),)


class Doubles(Exception):
    """Changes what it is made of."""

    def __init__(self, data):
        super().__init__(data)
        data[0] *= 2


def raise_doubles():
    error = Doubles(bytearray(b"\1" * BIG))
    raise error


def test_trying_an_exception_does_not_change_it(call):
    with pytest.raises(Doubles) as caught:
        call(raise_doubles)
    assert caught.value.args[0][0] == 4  # doubled where it was made, and where it is loaded


def no_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return pattern(BIG)


def test_a_result_for_which_there_is_no_room_is_told_and_the_process_ends_in_order(recwarn):
    run_isolated(int)
    with ThreadPoolExecutor(1, initializer=refuse_to_read, initargs=(errno.ENOSYS,)) as pool:
        answer = pool.submit(run_isolated, no_room)
    with pytest.raises(TypeError, match=r"cannot be brought to this process: OSError: .*File too large"):
        answer.result()
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, EngineCleanupWarning)]


def alarm():
    def ring(*_):
        raise RuntimeError("a signal handler of the function's")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    return pattern(BIG)


def test_a_signal_handler_that_raises_while_the_result_is_handed_over_harms_nothing(monkeypatch, recwarn):
    meanwhile(monkeypatch, lambda _: time.sleep(1))
    assert run_isolated(alarm) == pattern(BIG)
    assert not [str(warning.message) for warning in recwarn if "before" in str(warning.message)]


def test_nothing_of_a_file_is_kept(call):
    call(int)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept = [call(pattern, BIG) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert kept[0] == pattern(BIG)


def test_a_result_for_which_the_caller_has_no_memory_is_told(monkeypatch):
    def no_memory(_):
        raise MemoryError

    monkeypatch.setattr(errand.neighbour_memory, "new", no_memory)
    for kind in (bytes, bytearray):
        with pytest.raises(MemoryError, match=rf"run_isolated\({kind.__name__}\): there is no memory here .* of 2 MiB"):
            run_isolated(kind, 2 * BIG)


def an_array():
    import numpy

    return numpy.zeros(BIG, dtype=numpy.uint8)


def test_an_array_for_which_the_caller_has_no_memory_is_told(call, monkeypatch):
    pytest.importorskip("numpy")

    def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(neighbour_memory.mmap, "mmap", no_memory)
    with pytest.raises(MemoryError, match=r"run_isolated\(an_array\): there is no memory here .* of 1 MiB"):
        call(an_array)


def test_the_memory_of_a_tensor_is_a_piece_of_its_own():
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    pieces = cargo.pack_answer(file, torch.ones(BIG), {})
    assert [len(piece) for piece in pieces] == [4 * BIG]
    assert len(file.getvalue()) < 1000
