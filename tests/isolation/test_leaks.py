"""Isolation hides no leak: what leaks in the process of a test, and what outlives it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "plugin" / "fake_gpu.py"
PLUGINS = ("-p", "fake_gpu", "-p", "shared_gpu", "-p", "recorder")
HEADER = """
import atexit, os, pytest, subprocess, sys
from fake_gpu import MIB, Tensor, gpu
from shared_gpu import hold

def start():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open("started.txt", "a") as file:
        file.write(f"{process.pid}\\n")
    return process.pid
"""
LEAKS = (
    HEADER
    + """
pytestmark = [pytest.mark.vllm_isolated, pytest.mark.gpu_released(timeout=0)]

def test_clean(record_property):
    tensor = Tensor()
    record_property("own", 1)

def test_in_process(record_property):
    record_property("own", 2)
    gpu.allocated += 2 * MIB

def test_outlives_its_process():
    atexit.register(hold, start(), 3 * MIB)

def test_both():
    gpu.allocated += 2 * MIB
    hold(start(), 5 * MIB)

def test_fails_and_leaks():
    gpu.allocated += 2 * MIB
    assert 0, "its own failure"

def test_dies_and_leaves_a_process():
    hold(start(), 7 * MIB)
    os._exit(3)

def test_clean_again():
    pass
"""
)


def suite(folder, files):
    made = folder(files, copies=["shared_gpu.py", "recorder.py", "helpers.py"])
    shutil.copy(FAKE, made.path / FAKE.name)
    return made


@pytest.fixture(scope="module")
def run(folder_factory):
    folder = suite(folder_factory, {"test_leaks.py": LEAKS})
    yield folder.run(*PLUGINS, "-ra", "--junitxml=junit.xml", "-o", "junit_family=xunit1")
    end_all(folder)


def end_all(folder):
    """End what the tests have left running; those that are gone already were somebody else's by now."""
    started = folder.path / "started.txt"
    for pid in started.read_text().split() if started.exists() else []:
        with suppress(OSError):
            if b"time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def teardown(run, name):
    (found,) = (r for r in run.record["reports"] if r["nodeid"].endswith(f"::{name}") and r["when"] == "teardown")
    return found


def test_each_leak_has_its_status(run):
    assert run.status == 1
    assert run.counts == {"failed": 2, "passed": 5, "leaked": 4}
    leaks = {"test_in_process", "test_outlives_its_process", "test_both", "test_fails_and_leaks"}
    assert {r["nodeid"].partition("::")[2] for r in run.record["reports"] if _leaked(r)} == leaks


def _leaked(report):
    return report["when"] == "teardown" and (report.get("vllm_cleanup") or {}).get("outcome") == "leaked"


def test_a_leak_in_the_process_is_reported_as_if_it_had_been_here(run):
    (line,) = (line for line in run.lines if "test_in_process left" in line)
    assert "left 2 MiB (2097152 bytes) on cuda:0" in line
    properties = dict(teardown(run, "test_in_process")["user_properties"])
    assert properties["gpu_memory_outcome"] == "leaked"
    assert properties["gpu_memory_stayed_bytes"] == 2 << 20
    assert properties["own"] == 2


def test_what_outlives_the_process_is_a_leak_of_its_test(run):
    (line,) = (line for line in run.lines if "test_outlives_its_process left" in line)
    assert "left 3 MiB (3145728 bytes) on cuda:0" in line
    assert "VLLM::EngineCore" in line
    properties = dict(teardown(run, "test_outlives_its_process")["user_properties"])
    assert properties["gpu_memory_outcome"] == "leaked"


def test_a_leak_of_both_kinds_is_one_leak_with_both_in_the_evidence(run):
    (line,) = (line for line in run.lines if "test_both left" in line)
    assert "7 MiB" in line or "2 MiB" in line
    sections = [text for title, text in teardown(run, "test_both")["sections"] if title == "GPU memory"]
    assert len(sections) == 2
    properties = [name for name, _ in teardown(run, "test_both")["user_properties"]]
    assert properties.count("gpu_memory_outcome") == 1


def test_the_failure_of_a_test_that_leaks_stays_first(run):
    run.line("^FAILED .*test_fails_and_leaks - AssertionError: its own failure")


def test_clean_tests_are_released_before_and_after_leaks(run):
    for name in ("test_clean", "test_clean_again"):
        report = teardown(run, name)
        assert report["vllm_cleanup"]["outcome"] == "released"
        assert dict(report["user_properties"])["gpu_memory_outcome"] == "released"
        assert report["outcome"] == "passed"


def test_what_a_process_that_died_has_left_is_ended_before_the_verdict(run):
    report = teardown(run, "test_dies_and_leaves_a_process")
    assert report["outcome"] == "passed"
    assert (report.get("vllm_cleanup") or {"outcome": "released"})["outcome"] == "released"


def test_the_junit_report_has_the_verdicts(run):
    found = {}
    for case in run.junit.iter("testcase"):
        for entry in case.iter("property"):
            if entry.get("name") == "gpu_memory_outcome":
                found.setdefault(case.get("name"), []).append(entry.get("value"))
    assert found["test_clean"] == ["released"]
    assert found["test_in_process"] == found["test_outlives_its_process"] == found["test_both"] == ["leaked"]


def test_the_first_leak_ends_a_run_that_is_told_so(folder):
    made = suite(folder, {"test_leaks.py": LEAKS})
    run = made.run(*PLUGINS, "-x")
    end_all(made)
    assert run.counts == {"passed": 2, "leaked": 1}


LEAKY = (
    HEADER
    + """
FIXED = "FIXED" in os.environ

@pytest.mark.gpu_released(timeout=0)
def test_leaks():
    gpu.allocated += 0 if FIXED else 2 * MIB

@pytest.mark.gpu_released(timeout=0)
def test_clean():
    pass

@pytest.mark.vllm_isolated
def test_marked():
    pass

@pytest.fixture(scope="module")
def wide():
    yield
    gpu.allocated += 0 if FIXED else 2 * MIB

@pytest.mark.gpu_released(timeout=0)
def test_with_a_fixture(wide):
    pass
"""
)


def isolated(run):
    return {
        report["nodeid"].partition("::")[2]
        for report in run.record["reports"]
        if report["when"] == "teardown" and report.get("vllm_cleanup_isolated")
    }


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "1")], ids=["", "xdist"])
def test_a_test_that_leaked_is_isolated_until_it_leaks_no_more(folder, arguments):
    made = suite(folder, {"test_leaky.py": LEAKY})
    options = (*PLUGINS, "--vllm-cleanup-isolate=leaky", *arguments)
    first = made.run(*options)
    assert first.counts == {"passed": 4, "leaked": 2}
    assert isolated(first) == {"test_marked"}
    second = made.run(*options)
    assert second.counts["leaked"] == 2, "the culprit stays visible"
    assert isolated(second) == {"test_leaks", "test_marked"}
    third = made.run(*options, FIXED="1")
    assert third.counts == {"passed": 4}
    assert isolated(third) == {"test_leaks", "test_marked"}
    fourth = made.run(*options, FIXED="1")
    assert fourth.counts == {"passed": 4}
    assert isolated(fourth) == {"test_marked"}


def test_without_pytests_cache_nothing_is_remembered_and_nothing_fails(folder):
    made = suite(folder, {"test_leaky.py": LEAKY})
    options = (*PLUGINS, "--vllm-cleanup-isolate=leaky", "-p", "no:cacheprovider", "-k", "test_leaks or test_clean")
    for _ in range(2):
        run = made.run(*options)
        assert (run.counts["leaked"], isolated(run)) == (1, set())
        assert not re.search("went wrong|INTERNALERROR", run.output + run.errors)
