from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.usefixtures("hasty")

LEAK = """
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released
def test_clean():
    pass
def test_unmarked():
    pass
"""


def section(result, title):
    """The lines from a section's title to the next one."""
    lines = result.outlines
    start = next((at for at, line in enumerate(lines) if re.fullmatch(f"=+ {title} =+", line)), None)
    assert start is not None, result.stdout.str()
    found = []
    for line in lines[start + 1 :]:
        if line.startswith("===") or re.search(r"\d passed", line):
            break
        found.append(line)
    return found


def test_the_leaks_section_shows_each_leak_once_with_its_evidence(run):
    result = run(LEAK)
    lines = section(result, "LEAKS")
    assert re.fullmatch("_+ test_leak _+", lines[0])
    assert lines[1].startswith("test_inner.py::test_leak left 2 MiB (2097152 bytes) on cuda:0")
    assert re.fullmatch("-+ GPU memory -+", lines[2])
    evidence = [" ".join(line.split()) for line in lines[3:]]
    assert evidence[0] == "cuda:0 (read by fake)"
    assert "used 600 MiB -> 602 MiB (+2 MiB)" in evidence
    assert "allocated 0 B -> 2 MiB (+2 MiB)" in evidence
    assert "children 0 B -> 0 B" in evidence
    assert any(re.fullmatch(r"pid \d+ python: 602 MiB, ours", line) for line in evidence)
    assert "cuda:1 (read by fake)" in evidence
    assert result.stdout.str().count("test_leak left") == 1


def test_the_evidence_names_the_other_processes_on_the_device(run):
    result = run("""
@pytest.mark.gpu_released
def test_child():
    gpu.children = 512 * MIB
    gpu.others = 3 * MIB
""")
    lines = [line.strip() for line in section(result, "LEAKS")]
    assert "pid 4242 VLLM::EngineCore: 512 MiB, ours" in lines
    assert "pid 777 stranger: 3 MiB, not ours" in lines
    assert "on cuda:0 by processes on the device" in lines[1]
    assert "A child process still holds memory: close its engine with close_engine()" in lines[1]


@pytest.mark.parametrize("arguments", [["-q"], ["-qq"], ["--tb=no"], ["--no-header"], ["-rA"], ["--show-capture=no"]])
def test_a_leak_is_told_however_little_is_shown(run, arguments):
    result = run(LEAK, *arguments)
    assert result.ret == 1
    assert "test_leak left 2 MiB" in "\n".join(section(result, "LEAKS"))
    if "-qq" not in arguments:  # which has no last line
        assert re.search(r"3 passed, 1 leaked in", result.stdout.str())


def test_without_summary_the_count_and_the_exit_status_remain(run):
    result = run(LEAK, "--no-summary")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 3, "leaked": 1}


def test_a_header_line_is_not_needed_for_the_settings_to_hold(run):
    assert run(LEAK, "--no-header", "--vllm-cleanup-tolerance=2 MiB").parseoutcomes() == {"passed": 3}


def test_junit_has_the_leak_as_an_error_and_the_verdict_as_properties(run, pytester):
    run(
        LEAK
        + """
@pytest.mark.gpu_released
def test_failing():
    gpu.allocated += 3 * MIB
    assert 0, "own"
@pytest.fixture
def rude():
    yield
    raise ValueError("own")
@pytest.mark.gpu_released
def test_rude(rude):
    gpu.allocated += 4 * MIB
@pytest.mark.gpu_released
def test_foreign():
    gpu.others += 4096 * MIB
@pytest.mark.gpu_released
def test_blind():
    gpu.readable = second_gpu.readable = False
""",
        "--junitxml=junit.xml",
    )
    suite = ElementTree.parse(pytester.path / "junit.xml").getroot().find("testsuite")
    assert (suite.get("errors"), suite.get("failures")) == ("3", "1")
    cases = {}
    for case in suite.iter("testcase"):
        found = cases.setdefault(case.get("name"), {"problems": [], "properties": {}})
        found["problems"] += [(child.tag, child.get("message")) for child in case if child.tag in ("error", "failure")]
        found["properties"].update((node.get("name"), node.get("value")) for node in case.iter("property"))
    assert cases["test_leak"]["properties"] == {
        "gpu_memory_outcome": "leaked",
        "gpu_memory_stayed_bytes": "2097152",
    }
    ((tag, message),) = cases["test_leak"]["problems"]
    assert tag == "error"
    assert message.startswith('failed on teardown with "test_inner.py::test_leak left 2 MiB (2097152 bytes)')
    assert [tag for tag, _ in cases["test_failing"]["problems"]] == ["failure", "error"]
    assert cases["test_failing"]["properties"]["gpu_memory_stayed_bytes"] == "3145728"
    assert cases["test_rude"]["problems"] == [("error", 'failed on teardown with "ValueError: own"')]
    assert cases["test_rude"]["properties"]["gpu_memory_stayed_bytes"] == "4194304"
    assert cases["test_clean"] == {"problems": [], "properties": {"gpu_memory_outcome": "released"}}
    assert cases["test_foreign"] == {"problems": [], "properties": {"gpu_memory_outcome": "foreign"}}
    assert cases["test_blind"] == {"problems": [], "properties": {"gpu_memory_outcome": "unknown"}}
    assert cases["test_unmarked"] == {"problems": [], "properties": {}}


def test_a_leak_beside_a_failing_teardown_is_told_with_its_numbers(run):
    result = run("""
@pytest.fixture
def rude():
    yield
    raise ValueError("own")
@pytest.mark.gpu_released
def test_it(rude):
    gpu.allocated += 2 * MIB
""")
    assert "test_it left 2 MiB (2097152 bytes)" in "\n".join(section(result, "LEAKS"))
    # The evidence is beside the user's own error; once is enough.
    assert result.stdout.str().count("cuda:0 (read by fake)") == 1


REPORTS = """
import json
def pytest_runtest_logreport(report):
    data = getattr(report, "vllm_cleanup", None)
    if data is not None:
        print("\\nDATA", json.dumps([report.nodeid, report.when, data]))
"""


def test_the_report_of_the_teardown_carries_plain_data(run):
    import json

    result = run(LEAK, "-s", "--vllm-cleanup-timeout=1 min", conftest=REPORTS)
    found = [json.loads(line.removeprefix("DATA ")) for line in result.outlines if line.startswith("DATA ")]
    assert [(node, when) for node, when, _ in found] == [
        ("test_inner.py::test_leak", "teardown"),
        ("test_inner.py::test_clean", "teardown"),
    ]
    leak, clean = (data for _, _, data in found)
    assert (leak["outcome"], leak["stayed"], leak["trend"], leak["only_leaked"]) == ("leaked", 2097152, "flat", True)
    assert leak["text"].startswith("test_inner.py::test_leak left 2 MiB")
    assert 0.3 < leak["waited"] < 3
    first = leak["devices"][0]
    assert first == {
        "device": "cuda:0",
        "outcome": "leaked",
        "reason": "allocator",
        "meter": "torch allocator",
        "stayed": 2097152,
        "baseline": 0,
        "after": 2097152,
        "tolerance": 1048576,
    }
    assert (leak["owner"], leak["holder"], leak["diagnosis"]) == ("", "", [])
    assert (clean["outcome"], clean["text"], clean["stayed"], clean["waited"]) == ("released", "", 0, 0.0)
