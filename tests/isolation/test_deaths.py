"""Runs that are ended while an isolated test is running: nothing of it is left."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import psutil
import pytest

from .runs import GONE_WITHIN, children, gone

FAMILY = """
import os, pytest, subprocess, sys, time

def note(name):
    with open("pids.txt", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")

PROGRAM = "import time; time.sleep(600)"

@pytest.fixture
def slow_end():
    yield
    with open("torn down.txt", "w"): pass

@pytest.mark.vllm_isolated
def test_family(slow_end):
    child = subprocess.Popen([sys.executable, "-c", PROGRAM])
    other = subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True)
    time.sleep(0.1)
    with open("pids.txt", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {other.pid} ")
    if os.environ.get("THEN") == "dies":
        os._exit(3)
    if os.environ.get("THEN") == "closes":
        os.closerange(3, 4096)
        os.kill(os.getpid(), 9)
    time.sleep(600)

def test_next():
    pass
"""


def begun(folder, process):
    """Wait until the isolated test runs. Return the numbers of its process and of those that it has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        file = folder.path / "pids.txt"
        if file.exists() and file.read_text().endswith(" "):
            return [int(word) for word in file.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("\n".join(process.communicate(timeout=5)))


@pytest.fixture
def family(folder):
    return folder({"test_family.py": FAMILY})


def test_ctrl_c_ends_the_isolated_test_in_order_and_leaves_nothing(family):
    process = family.start("-ra")
    pids = begun(family, process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    run = family.outcome(process)
    assert time.monotonic() - began < 10
    assert run.status == 2
    assert "KeyboardInterrupt" in run.output
    assert "INTERNALERROR" not in run.output + run.errors
    assert (family.path / "torn down.txt").exists(), "its fixtures were not torn down"
    assert not gone(pids)


def test_a_second_ctrl_c_is_not_waited_for(family):
    process = family.start("-ra")
    pids = begun(family, process)
    psutil.Process(pids[0]).suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    run = family.outcome(process, timeout=20)
    assert run.status in (2, -signal.SIGINT)
    assert not gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_pytest_is_ended(family, number):
    process = family.start("-ra")
    pids = begun(family, process)
    process.send_signal(number)
    family.outcome(process, timeout=30)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number
        assert (family.path / "torn down.txt").exists(), "its fixtures were not torn down"
    else:
        assert process.returncode == -number
    assert not gone(pids, GONE_WITHIN)


def test_nothing_is_left_when_a_worker_of_pytest_xdist_is_killed(family):
    process = family.start("-ra", "-p", "xdist", "-n", "1", "--max-worker-restart=0")
    pids = begun(family, process)
    psutil.Process(pids[0]).parent().kill()
    run = family.outcome(process, timeout=60)
    assert run.status == 1
    assert "worker 'gw0' crashed while running 'test_family.py::test_family'" in run.output
    assert not gone(pids, GONE_WITHIN)


@pytest.mark.parametrize("fate", ["dies", "closes"])
def test_what_a_process_has_started_is_gone_when_it_has_died(family, fate):
    run = family.run("-ra", THEN=fate)
    assert run.counts == {"failed": 1, "passed": 1}
    assert run.seconds < 30
    assert not gone(map(int, (family.path / "pids.txt").read_text().split()), 1)


STRANGE = """
import os, pytest, sys, time

pytestmark = pytest.mark.vllm_isolated

def test_closes_all_descriptors():
    os.closerange(3, 4096)

def test_forks_and_the_fork_returns():
    if os.fork():
        os.wait()
    print("after the fork")

def test_forks_and_the_fork_lives():
    if not os.fork():
        with open("fork.txt", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(120)
    time.sleep(0.3)

@pytest.fixture
def broken_hook(monkeypatch):
    from _pytest import runner
    monkeypatch.setattr(runner, "check_interactive_exception", None)

def test_internal_error(broken_hook):
    assert 0

def test_changes_all(tmp_path):
    os.chdir(tmp_path)
    os.environ.clear()
    sys.path.clear()
    sys.stdout = sys.stderr = None

def test_passes():
    pass
"""


@pytest.fixture(scope="module")
def strange(folder_factory):
    folder = folder_factory({"test_strange.py": STRANGE}, copies=["recorder.py", "helpers.py"])
    yield folder.run("-ra", "-p", "recorder", timeout=120)
    # What a test leaves running deliberately is its own business, and here this one's.
    with suppress(OSError, psutil.NoSuchProcess):
        psutil.Process(int((folder.path / "fork.txt").read_text())).kill()


def outcomes(run, name):
    return [(r["when"], r["outcome"]) for r in run.record["reports"] if r["nodeid"].endswith(name)]


GOOD = [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]


def test_a_fork_that_returns_through_pytest_reports_nothing(strange):
    assert outcomes(strange, "the_fork_returns") == GOOD


def test_a_fork_that_lives_on_holds_nobody_up(strange):
    assert outcomes(strange, "the_fork_lives") == GOOD
    assert strange.seconds < 60


def test_a_process_without_its_connection_is_a_failure_that_says_so(strange):
    reports = {r["when"]: r for r in strange.record["reports"] if r["nodeid"].endswith("all_descriptors")}
    assert reports["call"]["outcome"] == "failed"
    assert "before its call was over" in reports["call"]["longreprtext"]


def test_an_error_of_pytest_itself_is_told_and_the_run_goes_on(strange):
    (text,) = (
        r["longreprtext"] for r in strange.record["reports"] if r["nodeid"].endswith("internal_error") and r["longrepr"]
    )
    assert "pytest itself failed in there:" in text
    assert "'NoneType' object is not callable" in text
    assert "INTERNALERROR" not in strange.output


def test_what_a_test_does_to_its_process_is_of_no_concern_to_others(strange):
    assert outcomes(strange, "changes_all") == GOOD
    assert outcomes(strange, "passes") == GOOD


@pytest.mark.parametrize(
    ("statement", "status", "text"),
    [
        ('pytest.exit("enough", returncode=9)', 9, "!!! _pytest.outcomes.Exit: enough !!!"),
        ("raise KeyboardInterrupt", 2, "!!! KeyboardInterrupt !!!"),
        ('request.session.shouldstop = "stop it"', 2, "!!! stop it !!!"),
        ('request.session.shouldfail = "fail it"', 1, "!!! fail it !!!"),
    ],
)
def test_a_test_can_end_the_run(folder, statement, status, text):
    source = f"""
import pytest, time

@pytest.fixture
def slow_end():
    yield
    time.sleep(0.5)
    with open("torn down.txt", "a") as file: file.write("once ")

@pytest.mark.vllm_isolated
def test_ends(request, slow_end):
    {statement}

def test_next(): pass
"""
    folder = folder({"test_end.py": source})
    isolated, in_process = folder.run(), folder.run("--vllm-cleanup-isolate=off")
    assert isolated.status == in_process.status == status
    assert isolated.counts == in_process.counts
    for run in (isolated, in_process):
        assert text.strip("! ") in run.output
        assert "INTERNALERROR" not in run.output + run.errors
    assert (folder.path / "torn down.txt").read_text() == "once once ", "its teardown was cut short"


CHILD = """
import os, sys
CHILD = os.environ.get("RUN", str(os.getpid())) != str(os.getpid())
os.environ.setdefault("RUN", str(os.getpid()))
"""
ONE = "import pytest\n@pytest.mark.vllm_isolated\ndef test_it(): pass\ndef test_other(): pass\n"


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        (
            {
                "conftest.py": CHILD,
                "test_it.py": "from conftest import CHILD\nif CHILD: import nothing_like_it\n" + ONE,
            },
            ("its file could not be collected there:", "No module named 'nothing_like_it'"),
        ),
        (
            {"conftest.py": CHILD, "test_it.py": ONE + "from conftest import CHILD\nif CHILD: del test_it\n"},
            ("it was not found there: what is collected depends on the process",),
        ),
        ({"conftest.py": CHILD + "if CHILD: os._exit(8)\n", "test_it.py": ONE}, ("exited with code 8",)),
        (
            {"conftest.py": CHILD + "if CHILD: raise OSError('no')\n", "test_it.py": ONE},
            ("exited with code", "OSError: no"),
        ),
        (
            {
                "conftest.py": CHILD,
                "sitecustomize.py": "import os\nif 'RUN' in os.environ: os._exit(4)\n",
                "test_it.py": ONE,
            },
            ("exited with code 4",),
        ),
        (
            {"conftest.py": CHILD + "def pytest_configure():\n if CHILD: raise ValueError('bad')\n", "test_it.py": ONE},
            ("exited with code", "ValueError: bad"),
        ),
    ],
    ids=["import", "not found", "conftest exits", "conftest raises", "sitecustomize", "configure raises"],
)
def test_a_process_that_never_comes_to_the_test_says_why(folder, files, texts):
    run = folder(files).run("-ra", PYTHONPATH=".")
    assert run.counts == {"error": 1, "passed": 1}
    for text in texts:
        assert text in run.output
    assert "before its start or setup was over" in run.output


def test_no_process_is_left_of_a_run(folder):
    process = folder({"test_it.py": ONE}).start()
    seen = set()
    while process.poll() is None:
        seen.update(children(process.pid))
        time.sleep(0.02)
    process.communicate()
    assert len(seen) >= 2, "neither the test's process nor the watchdog was seen"
    assert not gone(seen, 1)
