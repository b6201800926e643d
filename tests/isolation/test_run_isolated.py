"""run_isolated: a function in a fresh process."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle
import pytest

from pytest_vllm_cleanup import EngineCleanupWarning, IsolatedProcessError, IsolatedTimeoutError, run_isolated
from pytest_vllm_cleanup.devices.offered import Offer, Offered
from pytest_vllm_cleanup.isolation import cargo, errand, surroundings
from pytest_vllm_cleanup.isolation.importable import is_importable

HERE = {"pid": os.getpid()}


@contextmanager
def interrupted(file, times=1):
    """Press Ctrl-C so often, once there is a file."""

    def interrupt():
        while not file.exists():
            time.sleep(0.01)
        for _ in range(times):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def add(a, b=1):
    return a + b


def runs(pid):
    """Whether a process runs; one that has ended and that nobody has fetched does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def descriptors():
    """No descriptor stays open, whatever happened."""
    run_isolated_once()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def run_isolated_once(done=[]):  # noqa: B006  # starts the watchdog's helper
    if not done:
        done.append(run_isolated(add, 1))


# What goes there and comes back


def test_a_function_runs_in_a_fresh_interpreter_with_the_folder_path_and_environment_of_the_caller(
    monkeypatch, tmp_path
):
    (tmp_path / "found_by_path.py").write_text("VALUE = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("REMOVED", "removed")
    HERE["pid"] = -1  # a fork would see it

    def look(*, first, second):
        import found_by_path

        environ = [os.environ.get(name) for name in ("KEPT", "REMOVED", "ADDED", "CUDA_VISIBLE_DEVICES")]
        from isolation import test_run_isolated as me

        seen = me.HERE["pid"] == os.getpid(), os.getppid(), os.getcwd(), found_by_path.VALUE  # noqa: PTH109
        return seen, environ, sys.argv, hash("text"), first + second

    changes = {"REMOVED": None, "ADDED": "added", "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "1"}
    seen, environ, argv, number, total = run_isolated(look, first=1, second=2, env=changes, gpus=0)
    assert seen == (True, os.getpid(), str(tmp_path), 7)
    assert environ == ["kept", None, "added", ""]
    assert argv == sys.argv
    assert number == run_isolated(hash, "text", env={"PYTHONHASHSEED": "1"})
    assert total == 3
    assert "REMOVED" in os.environ
    assert "ADDED" not in os.environ


def takes_turns():
    from pytest_vllm_cleanup.engines.registry import registry

    return registry.turns is not None


def test_below_a_worker_engines_of_a_function_start_one_by_one_with_those_of_others():
    assert run_isolated(takes_turns, env={"PYTEST_XDIST_WORKER": "gw0"})
    assert not run_isolated(takes_turns, env={"PYTEST_XDIST_WORKER": None})


def has_a_context(leave):
    from pytest_vllm_cleanup.workers import starting

    starting.processes.holds_context = lambda: True
    starting._locks = lambda: types.SimpleNamespace(leave=leave)


def test_below_a_worker_the_process_of_a_function_takes_its_turn_to_end(tmp_path):
    run_isolated(has_a_context, (tmp_path / "alone").touch, env={"PYTEST_XDIST_WORKER": None})
    run_isolated(has_a_context, (tmp_path / "below a worker").touch, env={"PYTEST_XDIST_WORKER": "gw0"})
    assert [file.name for file in tmp_path.iterdir()] == ["below a worker"]


def test_an_interrupt_while_the_process_of_a_function_waits_for_its_turn_to_end_prints_nothing(tmp_path, capfd):
    file = tmp_path / "waits"

    def leave():
        file.touch()
        time.sleep(600)

    started = time.monotonic()
    with interrupted(file):
        run_isolated(has_a_context, leave, env={"PYTEST_XDIST_WORKER": "gw0"})
    assert time.monotonic() - started < 8
    assert capfd.readouterr().err == ""


def test_local_functions_closures_and_classes_go_by_value():
    class Local:
        def __init__(self, value):
            self.value = value

    factor = 3
    result = run_isolated(lambda made: Local(made.value * factor), Local(2))
    assert isinstance(result, Local)
    assert result.value == 6


def test_big_arguments_and_results_arrive_and_arrays_can_be_written_to():
    numpy = pytest.importorskip("numpy")
    data = os.urandom(2**20) * 40
    text, array, small = run_isolated(
        lambda data: (data[::-1], numpy.frombuffer(data, dtype="u1") + numpy.uint8(1), numpy.arange(3)), data
    )
    assert text == data[::-1]
    assert (array == numpy.frombuffer(data, dtype="u1") + numpy.uint8(1)).all()
    array[0] = 77
    assert array[0] == 77
    assert small.tolist() == [0, 1, 2]


def test_a_program_of_its_own_has_its_classes_and_source_lines_back(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import dataclasses, enum
            from pytest_vllm_cleanup import run_isolated

            class Colour(enum.Enum):
                RED = 1

            @dataclasses.dataclass
            class Result:
                colour: Colour
                def double(self):
                    return [self.colour] * 2

            class Problem(Exception):
                pass

            def make(fail):
                if fail:
                    raise Problem("no")  # the line
                return Result(Colour.RED), make, print

            double = Result.double
            result, function, printer = run_isolated(make, False)
            assert type(result) is Result and result.colour is Colour.RED
            assert function is make and printer is print and Result.double is double
            try:
                run_isolated(make, True)
            except Problem as problem:
                assert "# the line" in str(problem.__cause__), problem.__cause__
                print("caught")
            """
        )
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("caught\n", "")


def test_a_module_that_only_this_process_can_import_goes_by_value(tmp_path):
    file = tmp_path / "found_nowhere.py"
    file.write_text("NUMBER = 3\ndef triple(x):\n    return helper(x)\ndef helper(x):\n    return x * NUMBER\n")
    module = types.ModuleType("found_nowhere")
    module.__file__ = str(file)
    sys.modules["found_nowhere"] = module
    try:
        exec(compile(file.read_text(), file, "exec"), vars(module))
        assert not is_importable(module)
        assert run_isolated(module.triple, 5) == 15
    finally:
        del sys.modules["found_nowhere"]
    assert cloudpickle.list_registry_pickle_by_value() == set()


@pytest.mark.parametrize("module", [os, os.path, types, pytest, cloudpickle.cloudpickle, sys.modules[__name__]])
def test_what_can_be_imported_goes_by_name(module):
    assert is_importable(module)


def test_a_python_that_knows_no_memory_files_asks_the_system(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with cargo.memory_file() as file:
        assert not os.get_inheritable(file.fileno())
        cargo.pack(file, [add, 1])
        file.seek(0)
        assert cargo.unpack(file) == [add, 1]


# What is refused


def generator():
    yield 1


async def coroutine():
    return 1


async def asynchronous_generator():
    yield 1


class Callable:
    async def __call__(self):
        return 1


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (generator, "a generator function.*list"),
        (coroutine, r"a coroutine function.*asyncio\.run"),
        (asynchronous_generator, "an asynchronous generator function.*list"),
        (Callable(), r"a coroutine function.*asyncio\.run"),
        (7, "not a function"),
        (threading.Lock().acquire, "cannot be sent.*lock.*inside the function"),
    ],
)
def test_what_lives_in_one_process_is_refused_before_one_is_started(function, what):
    with pytest.raises(TypeError, match=what):
        run_isolated(function)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": "soon"},
        {"timeout": -1},
        {"gpus": 1000},
        {"gpus": -1},
        {"gpus": 0, "env": {"CUDA_VISIBLE_DEVICES": ""}},
    ],
)
def test_bad_values_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options)))[:4].replace("time", "not a duration")):
        run_isolated(add, 1, **options)


def test_a_variable_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="env: 'A': 1"):
        run_isolated(add, 1, env={"A": 1})


def test_a_result_that_lives_in_one_process_is_an_error_that_says_what_to_return():
    def on_a_device():
        torch = types.ModuleType("torch")
        torch.Tensor = type("Tensor", (), {"device": types.SimpleNamespace(type="cuda")})
        sys.modules["torch"] = torch
        return {"logits": [torch.Tensor()]}

    async def run():
        return 1

    for function, advice in (
        (lambda: (number for number in range(3)), "cannot pickle 'generator' object; return a list"),
        (lambda: run(), r"return asyncio\.run"),
        (lambda: [threading.Lock()], "lock.*return plain data"),
        (on_a_device, r"a tensor on .*cuda.*return \.cpu\(\) of it"),
    ):
        with pytest.raises(TypeError, match=advice):
            run_isolated(function)


def test_what_cannot_be_loaded_on_the_other_side_is_told(tmp_path):
    (tmp_path / "only_there.py").write_text("class Thing: pass")

    class Unloadable:
        def __reduce__(self):
            return os.listdir, ("/no such folder",)

    def make():
        import only_there

        return only_there.Thing()

    with pytest.raises(IsolatedProcessError, match="cannot be loaded in a fresh process: FileNotFoundError") as caught:
        run_isolated(add, Unloadable())
    assert "listdir" in str(caught.value.__cause__) or "no such folder" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match=r"cannot be loaded in this process.*only_there"):
        run_isolated(make, env={"PYTHONPATH": str(tmp_path)})


# Exceptions


class WithLock(Exception):
    def __init__(self):
        super().__init__("has a lock")
        self.lock = threading.Lock()


class OfTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(kind, *arguments):
    raise kind(*arguments)


def test_an_exception_is_raised_here_with_the_traceback_of_the_process_as_its_cause():
    def fails():
        try:
            fail(KeyError, "inner")
        except KeyError as problem:
            error = ValueError("outer")
            error.detail = [1, 2]
            raise error from problem

    with pytest.raises(ValueError, match="outer") as caught:
        run_isolated(fails)
    assert caught.value.detail == [1, 2]
    text = str(caught.value.__cause__)
    assert text.index("KeyError: 'inner'") < text.index("ValueError: outer")
    assert "raise error from problem" in text
    assert "callee.py" not in text
    assert [entry.name for entry in caught.traceback if not entry.ishidden(caught)] == [
        "test_an_exception_is_raised_here_with_the_traceback_of_the_process_as_its_cause"
    ]


def test_an_outcome_of_pytest_passes_on():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_isolated(pytest.skip, "not here")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((WithLock,), r"WithLock: has a lock\n.*cannot be pickled: TypeError: cannot pickle '_thread.lock' object"),
        ((OfTwo, 1, 2), r"OfTwo: 1 and 2\n.*cannot be pickled: TypeError: .*missing 1 required positional argument"),
        ((SystemExit, 3), r"SystemExit: 3\n.*it would end this process, too"),
        ((KeyboardInterrupt,), r"KeyboardInterrupt\n.*it would end this process, too"),
    ],
)
def test_an_exception_that_cannot_come_is_told_with_its_traceback(error, said):
    with pytest.raises(IsolatedProcessError, match=said) as caught:
        run_isolated(fail, *error)
    assert "raise kind(*arguments)" in str(caught.value.__cause__)
    assert caught.value.returncode is None


# Deaths


def end_by(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("function", "argument", "code", "said"),
    [
        (os._exit, 3, 3, r"exited with code 3 before the function had returned.*os\._exit"),
        (os._exit, 0, 0, "exited with code 0"),
        (end_by, signal.SIGKILL, -9, "was killed by SIGKILL.*out of memory"),
        (end_by, signal.SIGSEGV, -11, r"was killed by SIGSEGV(.|\n)*in end_by"),
        (end_by, signal.SIGRTMIN + 6, -signal.SIGRTMIN - 6, r"was killed by signal \d+ before"),
    ],
)
def test_a_process_that_dies_is_told_with_its_code_or_signal(function, argument, code, said):
    with pytest.raises(IsolatedProcessError, match=said) as caught:
        run_isolated(function, argument)
    assert caught.value.returncode == code


def start_detached(folder):
    """Start a process that is nobody's child, by two forks and without a program; return when it has noted itself."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (folder / "new").write_text(str(os.getpid()))
            (folder / "new").rename(folder / "pid")
            time.sleep(600)
        os._exit(0)
    while not (folder / "pid").exists():
        time.sleep(0.01)


def start_and_hang(folder):
    start_detached(folder)
    time.sleep(600)


def test_a_timeout_ends_the_process_and_all_that_it_started_and_shows_where_it_was(tmp_path):
    started = time.monotonic()
    with pytest.raises(IsolatedTimeoutError, match=r"not returned after 1.5 s(.|\n)*in start_and_hang") as caught:
        run_isolated(start_and_hang, tmp_path, timeout="1500 ms")
    assert time.monotonic() - started < 4
    assert isinstance(caught.value, TimeoutError)
    assert not runs(int((tmp_path / "pid").read_text()))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.returncode) == (str(caught.value), -signal.SIGABRT)


def test_a_timeout_of_zero_means_any_time():
    assert run_isolated(add, 1, timeout=0) == run_isolated(add, 1, timeout="0 s") == 2


def test_what_a_function_has_started_ends_with_it(tmp_path):
    run_isolated(start_detached, tmp_path)
    assert not runs(int((tmp_path / "pid").read_text()))


def test_ctrl_c_in_the_caller_passes_on_and_leaves_nothing(tmp_path):
    with interrupted(tmp_path / "pid"):
        run_isolated(start_and_hang, tmp_path)
    assert not runs(int((tmp_path / "pid").read_text()))


def test_a_second_ctrl_c_kills_a_function_that_does_not_mind_the_first_one(tmp_path):
    def stays():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_and_hang(tmp_path)

    started = time.monotonic()
    with interrupted(tmp_path / "pid", times=2):
        run_isolated(stays)
    assert time.monotonic() - started < 4
    assert not runs(int((tmp_path / "pid").read_text()))


def test_a_process_that_does_not_exit_is_ended_and_its_result_kept(monkeypatch):
    monkeypatch.setattr(errand, "_EXIT", 0.5)

    def stays():
        threading.Thread(target=time.sleep, args=(600,), name="stays").start()
        return 5

    with pytest.warns(EngineCleanupWarning, match=r"did not exit within 0.5 s(.|\n)*_shutdown"):
        assert run_isolated(stays) == 5


def test_a_process_that_dies_while_it_exits_has_given_its_result():
    def dies_late():
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return 5

    with pytest.warns(EngineCleanupWarning, match="was killed by SIGKILL while it exited"):
        assert run_isolated(dies_late) == 5


def test_a_fork_that_comes_back_from_the_function_answers_nothing():
    class Waits:
        def __init__(self, pid):
            self.pid = pid

        def __reduce__(self):  # the other one comes back while this one answers
            os.waitpid(self.pid, 0)
            return str, ("parent",)

    def forks():
        pid = os.fork()
        if not pid:
            time.sleep(0.2)
        return Waits(pid) if pid else "child"

    assert run_isolated(forks) == "parent"


# Output


def speak():
    print("to stdout", flush=False)
    sys.stderr.write("to stderr é")
    sys.stdout.write("unfinished")
    os.kill(os.getpid(), signal.SIGKILL)


def say_it():
    with suppress(IsolatedProcessError):
        run_isolated(speak)


def test_output_goes_to_the_descriptors_of_the_caller_also_at_death(capfd):
    print("before")
    say_it()
    print(" after")
    assert capfd.readouterr() == ("before\nto stdout\nunfinished after\n", "to stderr é")


def test_output_goes_to_streams_without_a_descriptor(capsys):
    say_it()
    assert capsys.readouterr() == ("to stdout\nunfinished", "to stderr é")


def test_much_output_is_passed_on_whole_and_a_broken_stream_stops_nobody(monkeypatch):
    class Notebook(io.StringIO):
        def fileno(self):
            return 1  # as Jupyter's do, which is not where it writes to

    class Broken(io.TextIOBase):
        def write(self, text):
            raise ValueError("closed")

    def much():
        for number in range(20_000):
            print(number, "x" * 100)
            print("x" * 100, file=sys.stderr)

    monkeypatch.setattr(sys, "stdout", notebook := Notebook())
    monkeypatch.setattr(sys, "stderr", Broken())
    run_isolated(much)
    assert notebook.getvalue() == "".join(f"{number} {'x' * 100}\n" for number in range(20_000))
    monkeypatch.setattr(sys, "stdout", None)
    run_isolated(print, "to nobody")


# Where it is called


def nested(number):
    return run_isolated(add, number, b=10) + 100


def test_several_at_a_time_in_threads_and_one_inside_another():
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda call: run_isolated(*call), [(add, 1), (add, 2), (nested, 3)])) == [2, 3, 113]


def test_inside_an_isolated_test_and_under_other_ways_to_import_and_to_capture(pytester):
    pytester.makepyfile(
        **{
            "folder/test_it": """
            import pytest
            from pytest_vllm_cleanup import run_isolated

            class Kept:
                pass

            def make():
                print("said in there")
                return Kept()

            @pytest.mark.vllm_isolated
            def test_isolated():
                assert type(run_isolated(make)) is Kept

            def test_plain(capsys):
                assert type(run_isolated(make)) is Kept
                assert capsys.readouterr().out == "said in there\\n"
                run_isolated(make)
                assert 0
            """
        }
    )
    result = pytester.runpytest_subprocess("--import-mode=importlib", "--capture=sys")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Captured stdout call*", "said in there"])


# Devices

NUMBERED = Offer(("CUDA_VISIBLE_DEVICES",), tuple(Offered(text, f"GPU-{text}a", f"GPU-{text}a") for text in "357"))
NAMED = Offer(("CUDA_VISIBLE_DEVICES",), (Offered("GPU-a1", "GPU-a1", "GPU-a1"), Offered("GPU-a2", "GPU-a2", None)))


@pytest.mark.parametrize(
    ("offer", "gpus", "value"),
    [
        (NUMBERED, 0, ""),
        (NUMBERED, 2, "3,5"),
        (NUMBERED, [2, 0], "7,3"),
        (NUMBERED, ["GPU-7a", 0], "7,3"),
        (NUMBERED, ["gpu-5"], "5"),
        (NUMBERED, [], ""),
        (NAMED, 1, "GPU-a1"),
        (NAMED, (1,), "GPU-a2"),
    ],
)
def test_devices_are_those_of_the_caller_in_its_spelling(offer, gpus, value):
    assert surroundings.chosen(offer, gpus) == {"CUDA_VISIBLE_DEVICES": value}


@pytest.mark.parametrize(
    ("offer", "gpus", "said"),
    [
        (NUMBERED, 4, "gpus=4: more than the 3 devices"),
        (Offer(("X",), (), "no driver"), 1, r"gpus=1: more than the 0 devices that this process sees \(no driver\)"),
        (NUMBERED, -1, "0 or more"),
        (NUMBERED, [3], "no device 3 among the 3 devices.*from 0"),
        (NUMBERED, [1, 1], "twice"),
        (NUMBERED, ["GPU-"], "names 3 of the 3 devices"),
        (NUMBERED, ["5"], "names 0 of the 3 devices"),
        (NUMBERED, "GPU-5", "a list"),
        (NUMBERED, True, "a list"),
        (NUMBERED, [1.5], "neither an ordinal nor a UUID"),
    ],
)
def test_devices_that_are_not_there_are_refused(offer, gpus, said):
    with pytest.raises((ValueError, TypeError), match=said):
        surroundings.chosen(offer, gpus)
