"""Isolated tests with other options, and with other plugins."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time

import pytest

from .runs import INNER, OFF, PYTEST, Folder, untouched
from .test_matrix import cleaned, differences

# Options, and what else is special. Each runs the same two tests.
SURROUNDINGS = {
    "plain": ([], {}),
    "other ini file": (
        ["-c", "other.ini", "-o", "empty_parameter_set_mark=xfail"],
        {"PYTEST_ADDOPTS": "-vv --tb=line"},
    ),
    "from a folder below": (["test_same.py", "../b/test_same.py"], {"cwd": "a"}),
    "importlib": (["--import-mode=importlib", "-p", "extra"], {"PYTHONPATH": "."}),
    "rootdir and confcutdir": (["--rootdir=..", "--confcutdir=.", "a", "b/test_same.py::test_facts"], {}),
    "few plugins": (["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:logging", "-p", "no:tmpdir"], {}),
    "no terminal": (["-p", "no:terminal"], {}),
    "strict": (["-W", "error::RuntimeWarning", "--strict-markers", "--strict-config", "--durations=2"], {}),
    "no capture of files": (["--capture=sys", "--log-cli-level=INFO", "--log-file=log.txt", "-p", "extra"], {}),
    "flags of python": (["--basetemp=base"], {"start": ("-O", "-X", "dev", *PYTEST), "PYTHONHASHSEED": "3"}),
    "chosen tests": (["-k", "facts and not no", "-m", "vllm_isolated", "--deselect=b/x.py", "--maxfail=3"], {}),
    "packages": (["--pyargs", "a", "b.test_same"], {}),
}


def project(path):
    """Put the project into a folder."""
    shutil.copytree(INNER / "project", path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return Folder(path, copies=["recorder.py", "helpers.py"])


def arguments_taken_out(text):
    """Return the text without what tells isolated runs from others."""
    return text.replace("--vllm-cleanup-isolate=marked", OFF)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_an_isolated_test_finds_the_same_surroundings(tmp_path, name):
    options, how = SURROUNDINGS[name]
    folder = project(tmp_path)
    isolated, in_process = (
        folder.run("-p", "recorder", option, *options, **{"PYTHONPATH": "..:.", **how})
        for option in ("--vllm-cleanup-isolate=marked", OFF)
    )
    assert in_process.status == isolated.status == 0, isolated.output
    assert len(in_process.record["reports"]) == 6
    for ours, other in zip(isolated.record["reports"], in_process.record["reports"], strict=True):
        for report in (ours, other):
            report["keywords"].pop(folder.path.name, None)  # with --pyargs, pytest leaves the topmost folder out
        ours["sections"] = [[title, arguments_taken_out(text)] for title, text in ours["sections"]]
        assert not differences(cleaned(ours), cleaned(other))
    assert not differences(isolated.record["warnings"], in_process.record["warnings"])
    assert isolated.counts == in_process.counts
    assert "'vllm_cleanup_isolated'" in str(isolated.record["reports"])


# pytest-timeout

HANGS = """
import os, pytest, time

pytestmark = pytest.mark.vllm_isolated

@pytest.mark.timeout(1, method="signal")
def test_signal(): time.sleep(60)

@pytest.mark.timeout(1, method="thread")
def test_thread():
    print("before")
    time.sleep(60)

@pytest.fixture
def slow():
    time.sleep(1.5)

@pytest.mark.timeout(1, method="signal", func_only=True)
def test_only_the_function(slow): pass

def test_by_option(): time.sleep(60)

def test_passes(): pass
"""


def test_pytest_timeout_counts_in_the_process_of_the_test(folder):
    run = folder({"test_hangs.py": HANGS}).run("-p", "pytest_timeout", "--timeout=2", "-ra")
    assert run.counts == {"failed": 3, "passed": 2}
    assert run.seconds < 60
    run.line(r"^FAILED .*test_signal - Failed: Timeout \(>1.0s\)")
    run.line(r"^FAILED .*test_by_option - Failed: Timeout \(>2.0s\)")
    run.line(r"^FAILED .*test_thread - the process of this isolated test exited with code 1 before its call was over")
    assert "time.sleep(60)" in run.output
    assert "Timeout" in run.output.partition("test_thread _")[2].partition("test_by_option _")[0]


# pytest-rerunfailures

FLAKY = """
import os, pytest, signal
from pathlib import Path

pytestmark = pytest.mark.vllm_isolated

def attempt(name):
    with open(f"{name}.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return len(Path(f"{name}.txt").read_text().split())

def test_passes_at_third():
    assert attempt("third") == 3

@pytest.mark.flaky(reruns=1)
def test_dies_once():
    if attempt("dies") == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_fails():
    attempt("fails")
    assert 0

@pytest.mark.flaky(reruns=2, only_rerun="OSError")
def test_by_type():
    if attempt("type") == 1:
        raise FileNotFoundError("no such thing")
    raise KeyError("other")

@pytest.fixture
def shaky():
    assert attempt("setup") == 2

def test_setup(shaky): pass

@pytest.fixture
def shaky_end():
    yield
    assert attempt("teardown") == 2

def test_teardown(shaky_end): pass

@pytest.mark.flaky(reruns=2, only_rerun="OSError")
def test_by_pattern():
    attempt("pattern")
    raise OSError("again")
"""


def test_each_rerun_has_a_process_of_its_own(folder):
    files = {"test_flaky.py": FLAKY}
    folder, other = folder(files), folder(files)
    options = ("-p", "pytest_rerunfailures", "--reruns=2", "-rA")
    run = folder.run(*options)
    for name, number in (("third", 3), ("dies", 2), ("fails", 3), ("type", 1), ("setup", 2), ("pattern", 3)):
        pids = (folder.path / f"{name}.txt").read_text().split()
        assert len(set(pids)) == len(pids) == number, name
    in_process = other.run(*options, OFF, "--deselect=test_flaky.py::test_dies_once")
    expected = {**in_process.counts, "passed": in_process.counts["passed"] + 1, "rerun": in_process.counts["rerun"] + 1}
    del expected["deselected"]
    assert run.counts == expected


# pytest-cov, coverage

COVERED = {
    "covered.py": """
def by_isolated():
    return 1

def by_other():
    return 2

def by_nobody():
    return 3

def by_child():
    return 4
""",
    "test_covered.py": """
import covered, os, pytest

@pytest.mark.vllm_isolated
def test_isolated():
    assert covered.by_isolated() == 1

def test_other():
    assert covered.by_other() == 2

@pytest.mark.vllm_isolated
def test_dies():
    covered.by_nobody()
    os._exit(3)
""",
}


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "2")], ids=["", "xdist"])
def test_pytest_cov_counts_what_isolated_tests_run(folder, arguments):
    run = folder(COVERED).run("-p", "pytest_cov", "--cov=covered", "--cov-report=term-missing", *arguments)
    assert run.counts == {"failed": 1, "passed": 2}
    # Lines of by_nobody: coverage writes at the end of a process, which the one that died had not.
    assert run.line(r"^covered.py +8 +2 +75%").split()[-2:] == ["9,", "12"]
    assert "CoverageWarning" not in run.output + run.errors


def test_coverage_run_counts_what_isolated_tests_run(folder):
    folder = folder(COVERED)
    run = folder.run(start=("-m", "coverage", "run", "--source=.", "--branch", *PYTEST))
    assert run.counts == {"failed": 1, "passed": 2}
    for arguments in (("combine", "--append"), ("report", "-m")):
        command = [sys.executable, "-m", "coverage", *arguments]
        report = subprocess.run(command, cwd=folder.path, env=untouched(), capture_output=True, text=True)
    assert re.search(r"^covered.py +8 +2 .* 9, 12$", report.stdout, re.M), report.stdout + report.stderr


# Which tests run

CHOICE = """
import pytest

pytestmark = pytest.mark.vllm_isolated

def test_one(): pass
def test_two(): assert 0
def test_three(): assert 0
def test_four(): pass
"""


def test_options_that_choose_tests_see_those_that_failed(folder):
    folder = folder({"test_choice.py": CHOICE})
    assert folder.run("-x").counts == {"failed": 1, "passed": 1}
    assert folder.run("--lf").counts == {"failed": 1}, "only the failed one was remembered"
    run = folder.run("--maxfail=2", "--ff", "-v")
    assert run.counts == {"failed": 2, "passed": 1}
    first = next(line for line in run.lines if "[" in line and "::" in line)
    assert first.startswith("test_choice.py::test_two FAILED")
    assert folder.run("--sw").counts == {"failed": 1, "passed": 1}
    run = folder.run("--sw", "--sw-skip")
    assert run.counts == {"failed": 2, "deselected": 1}, run.output


def test_output_that_is_not_captured_is_seen_at_once(folder):
    source = """
import os, pytest, sys, time

@pytest.mark.vllm_isolated
def test_talks():
    print("first words", flush=True)
    sys.stdin.read()
    os.write(2, b"and errors")
    time.sleep(3)
"""
    process = folder({"test_talks.py": source}).start("-s")
    began = time.monotonic()
    while "first words" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    seen = time.monotonic()
    output, errors = process.communicate(timeout=60)
    assert time.monotonic() - seen > 2.5, f"seen {seen - began:g} s after the start"
    assert "1 passed" in output
    assert errors == "and errors"


# Temporary folders

FOLDERS = """
import pytest

@pytest.mark.vllm_isolated
def test_passes(tmp_path, tmp_path_factory):
    (tmp_path / "file").touch()
    tmp_path_factory.mktemp("more")

@pytest.mark.vllm_isolated
def test_fails(tmp_path, tmpdir):
    (tmp_path / "file").touch()
    assert 0
"""


@pytest.mark.parametrize("policy", ["all", "failed"])
def test_temporary_folders_are_kept_as_without_isolation(folder, policy):
    folder = folder({"test_folders.py": FOLDERS})
    kept = []
    for number, isolate in enumerate(("marked", "off")):
        root = folder.path / f"root{number}"
        root.mkdir()
        options = (f"--vllm-cleanup-isolate={isolate}", "-o", f"tmp_path_retention_policy={policy}")
        assert folder.run(*options, PYTEST_DEBUG_TEMPROOT=str(root)).counts == {"failed": 1, "passed": 1}
        kept.append(sorted(path.parent.name for path in root.glob("*/pytest-0/**/file")))
    assert kept[0] == kept[1] == (["test_fails0", "test_passes0"] if policy == "all" else ["test_fails0"])


# pytest-xdist

GROUPS = """
import os, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.vllm_isolated
@pytest.mark.parametrize("name", ["a", "b@c", "d::e"])
def test_group(name, record_property, worker_id, testrun_uid):
    record_property("place", (worker_id, os.getpid(), os.getppid()))
    assert os.environ["PYTEST_XDIST_WORKER"] == worker_id

@pytest.mark.vllm_isolated
def test_fails(): assert 0

@pytest.mark.vllm_isolated
def test_dies(): os._exit(3)

@pytest.fixture(scope="session")
def shared(worker_id): return worker_id

@pytest.mark.vllm_isolated
@pytest.mark.parametrize("number", range(2))
def test_shared(shared, number, record_property): record_property("place", (shared, os.getpid(), os.getppid()))

def test_here(shared): pass
"""


def test_workers_of_pytest_xdist_have_isolated_tests_of_their_own(folder):
    folder = folder({"test_groups.py": GROUPS}, copies=["recorder.py", "helpers.py"])
    run = folder.run("-p", "xdist", "-n", "2", "--dist=loadgroup", "-p", "recorder", "-ra", "--junitxml=junit.xml")
    assert run.counts == {"failed": 2, "passed": 6}
    places = [
        (report["nodeid"], *dict(report["user_properties"])["place"])
        for report in run.record["reports"]
        if report["when"] == "teardown" and "place" in dict(report["user_properties"])
    ]
    assert {worker for _, worker, _, _ in places} <= {"gw0", "gw1"}
    assert len({pid for _, _, pid, _ in places}) == 5
    assert sum("set up again" in line for line in run.lines) == 1
    assert run.line("set up again").count("shared (session scope, test_groups.py)") == 1
    assert run.line("^FAILED .*test_dies").endswith("exited with code 3 before its call was over")
    assert len(list(run.junit.iter("testcase"))) == 8


# What is refused

REFUSED = ("--pdb", "--trace", "--setup-show", "--setup-only", "--setup-plan")
MODULE = "import pytest\n@pytest.mark.vllm_isolated\ndef test_it(): pass\n"


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_do(folder, option):
    run = folder({"test_it.py": MODULE}).run(option)
    assert run.status == 4
    text = (
        f"{option}: cannot be used with the 1 isolated test of this run; --vllm-cleanup-isolate=off runs all tests in"
    )
    assert text in run.output + run.errors
    assert "INTERNALERROR" not in run.output + run.errors


def test_what_is_refused_runs_without_isolation_and_without_isolated_tests(folder):
    folder = folder({"test_it.py": MODULE, "test_other.py": "def test_other(): pass\n"})
    assert folder.run("--setup-show", OFF).counts == {"passed": 2}
    assert folder.run("--setup-show", "test_other.py").counts == {"passed": 1}
    assert folder.run("--collect-only", "-q").status == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--vllm-cleanup-isolate=some",), "expected one of marked, all, leaky, off, got 'some'"),
        (("--vllm-cleanup-isolate-timeout=soon",), "soon"),
        (("-o", "vllm_cleanup_isolate_warm=perhaps"), "perhaps"),
    ],
)
def test_a_wrong_setting_ends_the_run(folder, arguments, text):
    run = folder({"test_it.py": MODULE}).run(*arguments)
    assert run.status == 4
    assert text in run.errors
    assert "isolate" in run.errors


WRONG = """
import pytest

@pytest.mark.vllm_isolated(timeout="soon")
def test_timeout(): pass

@pytest.mark.vllm_isolated(5, reason=7)
def test_reason(): pass

@pytest.mark.vllm_isolated(seconds=5)
def test_name(): pass

@pytest.mark.vllm_isolated("1 min", "why")
def test_right(): pass
"""


def test_a_wrong_marker_fails_its_test_and_no_other(folder):
    run = folder({"test_wrong.py": WRONG}).run("-ra")
    assert run.counts == {"error": 3, "passed": 1}
    assert "soon" in run.line("^ERROR .*test_timeout")
    assert "7" in run.line("^ERROR .*test_reason")
    assert "seconds" in run.line("^ERROR .*test_name") or "timeout" in run.line("^ERROR .*test_name")
