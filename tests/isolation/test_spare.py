"""The process that is started ahead, and imports what most tests need."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pytest_vllm_cleanup.isolation.starter import Starter

from .runs import children, gone

PACKAGE = """
import os, time
with open(os.environ["NOTES"], "a") as file:
    file.write(f"{os.getpid()} {__name__} {time.time()} {os.environ.get('SETTING')}\\n")
"""
SUITE = """
import gc, os, pytest, sys, time

pytestmark = pytest.mark.vllm_isolated

@pytest.fixture(autouse=True)
def place(record_property):
    began = time.time()
    record_property("place", (os.getpid(), began))

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    import torch, vllm
    assert sys.modules["torch"] is torch
    assert gc.isenabled()  # it stands still while they are imported ahead
    time.sleep(0.8)
"""


def files(suite=SUITE, **others):
    return {"packs/torch.py": PACKAGE, "packs/vllm/__init__.py": PACKAGE, "test_spare.py": suite, **others}


def places(run):
    return [dict(r["user_properties"])["place"] for r in run.record["reports"] if r["when"] == "teardown"]


def notes(folder):
    """Return when each process imported torch and vllm, and with which setting."""
    found = {}
    file = folder.path / "notes.txt"
    for line in file.read_text().splitlines() if file.exists() else []:
        pid, name, moment, setting = line.split()
        found.setdefault(int(pid), {})[name] = (float(moment), setting)
    return found


def start(folder, *arguments, **how):
    # Nothing is measured: these packages are not what they are called.
    how = {"PYTHONPATH": "packs", "NOTES": str(folder.path / "notes.txt"), "PYTEST_VLLM_CLEANUP_CHECK": "off", **how}
    return folder.run("-p", "recorder", "--vllm-cleanup-isolate-warm", *arguments, **how)


COPIES = ["recorder.py", "helpers.py"]


def test_the_next_process_imports_while_a_test_runs(folder):
    folder = folder(files(), copies=COPIES)
    run = start(folder)
    assert run.counts == {"passed": 3}
    imports, (first, *rest) = notes(folder), places(run)
    assert first[0] not in [pid for pid, _ in rest]
    for (_, before), (pid, began) in zip([first, *rest], rest, strict=False):
        # Ahead of its own test, and at the latest while the one before it was running, which sleeps.
        assert imports[pid]["torch"][0] < imports[pid]["vllm"][0] < min(began, before + 0.8)
    assert len(imports) == 3, "a process was started that no test needed"


MIXED = """
import os, psutil, pytest

def waiting():
    return [c.pid for c in psutil.Process().children(recursive=True) if "fresh.main" in str(c.cmdline())]

@pytest.mark.vllm_isolated
@pytest.mark.parametrize("number", range(4))
def test_there(number): pass

def test_here(): assert waiting() == []

@pytest.mark.vllm_isolated
def test_there_again(): pass

def test_here_again(): assert waiting() == []
"""


def test_none_is_there_while_a_test_runs_in_this_process(folder):
    folder = folder(files(MIXED), copies=COPIES)
    run = start(folder)
    assert run.counts == {"passed": 7}
    assert len(notes(folder)) >= 3


@pytest.fixture
def slow_imports(tmp_path, monkeypatch):
    """An interpreter of which others are started, where it takes a while to import vLLM."""
    packages = tmp_path / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text("import time\ntime.sleep(1.5)\n")
    (packages / "torch.py").write_text("")
    monkeypatch.syspath_prepend(packages)


@pytest.mark.parametrize(
    ("processors", "alike", "ahead"), [(16, 1, [2, 3, 4, 4]), (16, 2, [2, 2, 2, 2]), (2, 1, [1] * 4)]
)
def test_more_are_started_ahead_where_tests_are_over_sooner_than_imports(
    slow_imports, monkeypatch, processors, alike, ahead
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    starter, taken = Starter(shared_output=True, warm=True, alike=alike), []
    try:
        for number in reversed(range(1, 5)):
            starter.prepare(number)
            taken.append((starter.take(), starter.ahead))  # at once
        assert [seen for _, seen in taken] == ahead
    finally:
        for process, _ in taken:
            process.discard()
        starter.close()


def test_one_is_enough_where_imports_are_over_sooner_than_tests(slow_imports, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    starter = Starter(shared_output=True, warm=True)
    starter.prepare(3)
    time.sleep(6)
    process = starter.take()
    process.discard()
    starter.close()
    assert starter.ahead == 1


@pytest.mark.parametrize("warm", [False, True])
def test_one_that_has_died_is_not_handed_out(slow_imports, warm):
    starter = Starter(shared_output=True, warm=True)
    starter.prepare(1)
    (spare,) = spares()
    time.sleep(4 if warm else 0)
    os.kill(spare, signal.SIGKILL)
    assert not gone([spare])
    process = starter.take()
    process.discard()
    assert process.pid != spare


def spares():
    return [
        pid for pid in children(os.getpid()) if b"isolation import fresh" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_their_number_falls_where_they_are_early_and_where_environments_differ(slow_imports, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    starter = Starter(shared_output=True, warm=True)
    for _ in range(3):
        starter.prepare(9)
        starter.take().discard()
    assert starter.ahead == 4
    starter.prepare(9)
    time.sleep(9)
    starter.take().discard()
    assert starter.ahead == 3
    monkeypatch.setenv("SETTING", "another")
    starter.take().discard()
    assert starter.ahead == 1
    assert not gone(spares())
    starter.close()


def test_none_is_started_without_the_option_or_for_the_last_test(folder):
    folder = folder(files("import pytest\n@pytest.mark.vllm_isolated\ndef test_it(): pass\ndef test_two(): pass\n"))
    for option in ("--vllm-cleanup-isolate=marked", "--vllm-cleanup-isolate-warm"):
        how = {"PYTHONPATH": "packs", "NOTES": str(folder.path / "notes.txt")}
        assert folder.run(option, **how).counts == {"passed": 2}
    assert notes(folder) == {}


def test_a_process_has_the_environment_of_the_moment(monkeypatch):
    monkeypatch.setattr("os.environ", {**os.environ, "SETTING": "replaced"})
    process = Starter(shared_output=True, warm=False).take()
    process.discard()
    assert process.environ["SETTING"] == "replaced"


CHANGES = """
import os, pytest

@pytest.mark.vllm_isolated
def test_one(): pass

def test_here():
    os.environ["SETTING"] = "changed"

@pytest.mark.vllm_isolated
def test_two(record_property):
    import torch, vllm
    assert os.environ["SETTING"] == "changed"
"""


def test_one_whose_environment_is_not_the_same_any_more_is_not_used(folder):
    folder = folder(files(CHANGES), copies=COPIES)
    run = start(folder, "-rA", SETTING="first")
    assert run.counts == {"passed": 3}
    settings = [imports[name][1] for imports in notes(folder).values() for name in imports]
    assert settings.count("changed") == 2, "what the test has imported has seen the setting"


ENDS = """
import os, pytest, time

@pytest.mark.vllm_isolated
@pytest.mark.parametrize("number", range(3))
def test_it(number):
    with open("running.txt", "w") as file:
        file.write("x")
    time.sleep(float(os.environ["SECONDS"]))
    assert 0
"""


def watched(folder, process, until=lambda: False):
    """Return all processes that a run has started, and wait for its end or for something."""
    seen = set()
    while process.poll() is None and not until():
        seen.update(children(process.pid))
        time.sleep(0.02)
    return seen


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_none_is_left_when_a_run_ends_early(folder, number):
    folder = folder(files(ENDS))
    how = {"PYTHONPATH": "packs", "NOTES": str(folder.path / "notes.txt")}
    seconds = "1" if number is None else "60"
    process = folder.start("-x", "--vllm-cleanup-isolate-warm", SECONDS=seconds, **how)
    seen = watched(
        folder, process, lambda: number is not None and any("vllm" in done for done in notes(folder).values())
    )
    if number is not None:
        seen.update(children(process.pid))
        process.send_signal(number)
    seen.update(watched(folder, process))
    output, errors = process.communicate(timeout=60)
    assert len(notes(folder)) >= 1, output + errors
    assert set(notes(folder)) <= seen
    assert not gone(seen)


def test_it_imports_from_where_the_tests_import_and_not_from_the_current_folder(folder):
    script = Path(sys.executable).with_name("pytest")
    if not script.exists():
        pytest.skip("pytest has no command here")
    wrong = "raise SystemExit('the wrong module')\n"
    made = folder({**files(), "vllm.py": wrong, "socket.py": wrong, "pickle.py": wrong, "work/x": ""})
    tests = made.path / "tests"
    tests.mkdir()
    (made.path / "test_spare.py").rename(tests / "test_spare.py")
    (made.path / "tests" / "recorder.py").write_text("")
    run = made.run(
        "--vllm-cleanup-isolate-warm",
        "tests",
        start=(str(script), "-p", "vllm_cleanup"),
        PYTHONPATH=str(made.path / "packs"),
        NOTES=str(made.path / "notes.txt"),
    )
    assert run.counts == {"passed": 3}, run.output + run.errors
    assert len(notes(made)) == 3


LOADED = """
import sys
def pytest_sessionfinish():
    print("\\nISOLATION", sorted(name for name in sys.modules if name.startswith("pytest_vllm_cleanup.isolation")))
"""


def test_a_run_without_isolated_tests_loads_nothing_of_isolation(folder):
    folder = folder({"conftest.py": LOADED, "test_it.py": "def test_it(): pass\n"})
    assert folder.run("-s").line("^ISOLATION") == "ISOLATION []"
    assert (
        folder.run("-s", "--vllm-cleanup-isolate-warm", "--vllm-cleanup-isolate=off").line("^ISOLATION").endswith("[]")
    )
