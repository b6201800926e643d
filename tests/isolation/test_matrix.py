"""Each outcome that a test can have: isolated, it is reported as it is without isolation."""

from __future__ import annotations

import difflib
import re
import xml.etree.ElementTree as ET

import pytest

from .runs import INNER, OFF

# What fixtures of wider scope print: isolated tests have their own, so it is there for each of them.
_WIDER = ("module up", "module down", "class up", "setUpClass")
_ISOLATED = ("--vllm-cleanup-isolate=all", OFF)


def alike(text):
    """Return a text without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"(perf_count|time|start|stop|duration)=[\d.]+", r"\1=", text)
    # pytest prints this of the parts of a unittest, in one process into the output that it captures of the test.
    text = re.sub(r"(test_outcomes\S+ )?SUB(PASS|FAIL)ED\[part\] \(number=\d\) *\[ *\d+%\]", "\n", text)
    return "\n".join(line for line in text.splitlines() if line.strip() and line not in _WIDER)


def normal(value):
    if isinstance(value, str):
        return alike(value)
    if isinstance(value, dict):
        return {key: normal(item) for key, item in value.items()}
    return [normal(item) for item in value] if isinstance(value, list) else value


def names():
    """Return the tests of the inner module, as the report names them."""
    text = (INNER / "outcomes.py").read_text()
    return sorted(set(re.findall(r"def (test_\w+)", text)))


CASES = names()


@pytest.fixture(scope="module")
def runs(folder_factory):
    """The tests of outcomes.py, isolated and not."""
    folder = folder_factory(copies=["outcomes.py", "helpers.py", "recorder.py"])
    (folder.path / "outcomes.py").rename(folder.path / "test_outcomes.py")
    options = ("--doctest-modules", "--showlocals", "--junitxml=junit.xml", "-rap", "-v", "test_outcomes.py")
    return tuple(folder.run("-p", "recorder", isolated, *options) for isolated in _ISOLATED)


def differences(one, other, where=""):
    """Return where two values differ, and how."""
    if type(one) is type(other) and isinstance(one, dict):
        return [d for key in {**one, **other} for d in differences(one.get(key), other.get(key), f"{where}.{key}")]
    if type(one) is type(other) and isinstance(one, list) and len(one) == len(other):
        return [d for n, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{where}[{n}]")]
    if isinstance(one, str) and isinstance(other, str) and "\n" in one:
        lines = difflib.unified_diff(other.splitlines(), one.splitlines(), lineterm="", n=0)
        return [f"{where}: {line}" for line in list(lines)[2:]]
    return [] if one == other else [f"{where}: {one!r} != {other!r}"]


def reports_of(run, case):
    return [report for report in run.record["reports"] if case_of(report) == case]


def case_of(report):
    return re.split(r"[\[(]", report["location"][2])[0].rpartition(".")[2]


def cleaned(report):
    """Return what of a report must be the same, in a form that can be compared."""
    assert report["duration"] >= 0
    assert report["stop"] >= report["start"] >= 0
    left = {key: value for key, value in report.items() if key not in ("duration", "start", "stop", "caplog")}
    left["sections"] = [section for section in normal(left["sections"]) if section[1].strip()]
    left["vllm_cleanup_isolated"] = left["$report_type"] = None
    return normal(left)


@pytest.mark.parametrize("case", CASES)
def test_the_reports_are_the_same(runs, case):
    isolated, in_process = ([cleaned(report) for report in reports_of(run, case)] for run in runs)
    assert in_process, "it has not run"
    assert not differences(isolated, in_process)


def test_no_report_is_missing_or_twice(runs):
    isolated, in_process = ([(r["nodeid"], r["when"]) for r in run.record["reports"]] for run in runs)
    assert isolated == in_process
    assert len(in_process) > 150
    assert ("test_outcomes.py::test_outcomes.test_with_an_example", "call") in in_process


def test_doctests_are_isolated_too(runs):
    isolated, in_process = (
        [cleaned(report) for report in run.record["reports"] if "with_an_example" in report["nodeid"]] for run in runs
    )
    assert not differences(isolated, in_process)
    assert "Expected:\n    False\nGot:\n    True" in isolated[1]["longreprtext"]


def test_every_isolated_report_says_so_and_no_other(runs):
    for run, expected in zip(runs, (True, False), strict=True):
        teardowns = [r for r in run.record["reports"] if r["when"] == "teardown" and "context" not in r]
        assert {("vllm_cleanup_isolated" in report) for report in teardowns} == {expected}


def test_the_warnings_are_the_same(runs):
    isolated, in_process = (run.record["warnings"] for run in runs)
    assert not differences(isolated, in_process)
    assert {warning["category"] for warning in isolated} >= {"UserWarning", "DeprecationWarning", "UnicodeWarning"}


def test_the_exit_status_and_the_counts_are_the_same(runs):
    isolated, in_process = runs
    assert (isolated.status, isolated.counts) == (in_process.status, in_process.counts)
    assert in_process.counts["xfailed"] == 7
    assert isolated.errors == in_process.errors == ""


def printed(run):
    """Return the lines of a run, without those that tell how it was run."""
    text = alike(run.output)
    text = re.sub(r" in \d+\.\d+s.*", "", text)
    before, _, rest = text.partition("= isolated tests =")
    text = before + rest.partition("= short test summary info =")[2]
    skip = ("rootdir", "vllm-cleanup", "=", "-", "platform", "cachedir", "plugins")
    # The summary has a message of a failed example only where its report was sent, as by pytest-xdist.
    lines = [line.removesuffix(" - 273 Add.") for line in text.splitlines() if not line.startswith(skip)]
    return [line for line in lines if "::TestUnittest::test_subtests" not in line]  # see above


def test_the_terminal_shows_the_same(runs):
    assert printed(runs[0]) == printed(runs[1])


def test_the_junit_report_is_the_same(runs):
    texts = []
    for run in runs:
        for element in run.junit.iter():
            for name in ("time", "timestamp", "hostname"):
                element.attrib.pop(name, None)
        texts.append(alike(ET.tostring(run.junit, encoding="unicode")).splitlines())
    assert not differences(texts[0], texts[1])


STYLES = ("--tb=short", "--tb=native", "--tb=line")  # the others are in the runs above, or show pytest itself
FAILURES = "test_fails_in_a_helper or test_fails_with_a_chain or test_fails_and_error or test_xfails_in_setup"


@pytest.mark.parametrize("style", STYLES)
def test_tracebacks_are_printed_in_the_same_way(folder, style):
    folder = folder(copies=["outcomes.py", "helpers.py", "recorder.py"])
    (folder.path / "outcomes.py").rename(folder.path / "test_outcomes.py")
    options = ("-p", "recorder", style, "-k", FAILURES, "test_outcomes.py")
    isolated, in_process = (
        [cleaned(report) for report in folder.run(option, *options).record["reports"]] for option in _ISOLATED
    )
    assert len(in_process) == 11
    assert not differences(isolated, in_process)


LONG = """
import hashlib, os, pytest, sys

pytestmark = pytest.mark.vllm_isolated
SIZE = 50 * 2**20

def test_prints():
    for _ in range(SIZE // 2**20):
        sys.stdout.write("0123456789abcde\\n" * 2**16)

@pytest.mark.skipif("LAST" not in os.environ, reason="")
def test_prints_and_dies():
    test_prints()
    print("the last words")
    os._exit(7)
"""
LENGTHS = """
import hashlib
def pytest_runtest_logreport(report):
    if report.when == "call":
        text = dict(report.sections).get("Captured stdout call", "")
        print("LENGTH", len(text), hashlib.sha256(text.encode()).hexdigest())
"""


def test_50_mib_of_output_arrive(folder):
    folder = folder({"test_long.py": LONG, "conftest.py": LENGTHS})
    isolated, in_process = (folder.run("-rN", option).line("LENGTH").split()[-2:] for option in ("-q", OFF))
    assert isolated == in_process
    assert isolated[0] == str(50 * 2**20)


def test_50_mib_of_output_pass_through_where_they_are_not_captured(folder):
    run = folder({"test_long.py": LONG}).run("-s")
    assert run.counts == {"passed": 1, "skipped": 1}
    assert run.output.count("0123456789abcde\n") == 50 * 2**16


def test_the_last_of_50_mib_of_output_is_shown_for_a_process_that_died(folder):
    run = folder({"test_long.py": LONG}).run(LAST="1")
    assert run.counts == {"passed": 1, "failed": 1}
    assert "exited with code 7 before its call was over" in run.output
    assert "the last words" in run.lines
    assert 10_000 < len(run.output) < 100_000


@pytest.fixture(scope="module")
def deaths(folder_factory):
    """The tests of deaths.py, isolated: without isolation they would end the run."""
    folder = folder_factory(copies=["deaths.py", "recorder.py"])
    (folder.path / "deaths.py").rename(folder.path / "test_deaths.py")
    return folder.run("-p", "recorder", "-p", "test_deaths", "--junitxml=junit.xml", "-ra", "test_deaths.py")


def death(run, name):
    return {report["when"]: report for report in run.record["reports"] if report["nodeid"].endswith(f"::{name}")}


DIED = "the process of this isolated test "
DEATHS = [
    ("exit_0", "call", "exited with code 0 before its call was over"),
    ("exit_3", "call", "exited with code 3 before its call was over"),
    ("segfault", "call", "was killed by SIGSEGV before its call was over\nstacks of its threads:\nFatal Python error"),
    ("killed", "call", "was killed by SIGKILL before its call was over"),
    ("terminated", "call", "was killed by SIGTERM before its call was over"),
    ("dies_in_setup", "setup", "exited with code 5 before its start or setup was over"),
    ("dies_in_teardown", "teardown", "exited with code 6 before its teardown was over"),
    ("hangs", "call", "had not finished after 4 s, and was ended before its call was over\nstacks of its threads:"),
]


@pytest.mark.parametrize(("name", "when", "text"), DEATHS, ids=lambda v: str(v)[:12])
def test_a_death_is_a_failure_of_its_phase_and_is_named(deaths, name, when, text):
    reports = death(deaths, f"test_{name}")
    assert reports[when]["outcome"] == "failed"
    assert reports[when]["longreprtext"].startswith(DIED + text)
    others = {phase for phase, report in reports.items() if report["outcome"] == "passed"}
    assert others == ({"teardown"} if when == "setup" else {"setup", "call", "teardown"} - {when})


def test_the_stacks_of_a_crash_and_of_a_hang_name_the_line(deaths):
    for name, function in (("segfault", "in test_segfault"), ("hangs", "in test_hangs")):
        assert function in death(deaths, f"test_{name}")["call"]["longreprtext"]


def test_the_last_output_of_a_process_that_died_is_shown(deaths):
    for name in ("exit_0", "killed", "hangs"):
        sections = dict(death(deaths, f"test_{name}")["call"]["sections"])
        assert sections == {"Captured stdout call": "last words", "Captured stderr call": "last cries"}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("xfail_killed", "skipped"), ("xfail_raises_killed", "failed"), ("xfail_strict_killed", "skipped")],
)
def test_a_death_is_an_expected_failure_unless_an_exception_is_expected(deaths, name, outcome):
    report = death(deaths, f"test_{name}")["call"]
    assert report["outcome"] == outcome
    assert report.get("wasxfail") == ("known" if outcome == "skipped" else None)


def test_system_exit_is_the_failure_of_a_test_as_it_is_in_process(deaths):
    report = death(deaths, "test_raises_system_exit")["call"]
    assert report["outcome"] == "failed"
    assert report["longrepr"]["reprcrash"]["message"] == "SystemExit: 3"


def test_a_process_that_hangs_at_its_exit_is_ended_and_its_test_passes(deaths):
    assert {report["outcome"] for report in death(deaths, "test_hangs_at_exit").values()} == {"passed"}
    line = deaths.lines.index(deaths.line("test_hangs_at_exit: its process did not exit within 1 s of its reports"))
    assert any("_wait_for_tstate_lock" in text or "_shutdown" in text for text in deaths.lines[line:])


@pytest.mark.parametrize("name", ["test_closes_an_engine_for_long", "test_waits_for_long_to_leave"])
def test_a_process_that_closes_engines_or_waits_for_its_turn_is_given_more_time_than_to_exit(deaths, name):
    assert {report["outcome"] for report in death(deaths, name).values()} == {"passed"}
    assert f"{name}: its process" not in deaths.output


def test_a_process_that_hangs_after_it_has_closed_engines_is_not_given_more_time(deaths):
    deaths.line("test_hangs_between: its process did not exit within 1 s of its reports")


def test_a_process_that_crashes_at_its_exit_is_named_and_its_test_passes(deaths):
    assert {report["outcome"] for report in death(deaths, "test_crashes_at_exit").values()} == {"passed"}
    deaths.line("test_crashes_at_exit: its process was killed by SIGSEGV while it exited")


def test_the_run_goes_on_after_each_death(deaths):
    assert {report["outcome"] for report in death(deaths, "test_passes").values()} == {"passed"}
    assert deaths.status == 1
    assert deaths.counts == {"failed": 8, "passed": 7, "xfailed": 2, "error": 2}
    assert "INTERNALERROR" not in deaths.output
    assert deaths.errors == ""


def test_the_junit_report_names_the_deaths(deaths):
    messages = [element.get("message") for element in deaths.junit.iter("failure")]
    assert sum(DIED in message for message in messages) == 7
