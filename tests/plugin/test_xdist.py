from __future__ import annotations

import re

import pytest

pytest.importorskip("xdist")

pytestmark = pytest.mark.usefixtures("hasty")

MODULES = {
    "test_one": """
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released
def test_failing():
    gpu.allocated += 3 * MIB
    assert 0, "own"
""",
    "test_other": """
@pytest.mark.gpu_released
@pytest.mark.parametrize("number", range(5))
def test_clean(number):
    tensor = Tensor()
@pytest.mark.gpu_released
def test_blind():
    gpu.readable = second_gpu.readable = False
""",
}


def test_leaks_of_workers_are_counted_and_shown_by_the_controller(run, pytester):
    result = run(MODULES, "-p", "xdist", "-n", "2", "--dist=loadfile", "--junitxml=junit.xml")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 7, "failed": 1, "leaked": 2}
    assert "own" in result.stdout.str()
    text = result.stdout.str()
    leaks = text[text.index("= LEAKS =") :]
    assert "test_one.py::test_leak left 2 MiB (2097152 bytes) on cuda:0" in leaks
    assert "test_one.py::test_failing left 3 MiB (3145728 bytes) on cuda:0" in leaks
    assert leaks.count("cuda:1 (read by fake)") == 2
    assert "= GPU memory not measured =" in leaks
    assert "test_other.py::test_blind: whether GPU memory was released could not be measured" in leaks
    assert 'name="gpu_memory_stayed_bytes" value="2097152"' in (pytester.path / "junit.xml").read_text()


def test_the_status_of_a_leak_is_named_by_the_controller(run):
    result = run(MODULES, "-p", "xdist", "-n", "1", "-v")
    assert re.search(r"\[gw0\].* LEAKED test_one.py::test_leak", result.stdout.str())


def test_settings_reach_the_workers(run):
    assert run(MODULES, "-p", "xdist", "-n", "1", "--vllm-cleanup-check=off").parseoutcomes() == {
        "passed": 7,
        "failed": 1,
    }


def test_a_leak_stops_a_distributed_run_too(run):
    result = run({"test_one": MODULES["test_one"]}, "-p", "xdist", "-n", "1", "-x", "--vllm-cleanup-tolerance=0")
    assert result.ret in (1, 2)
    assert result.parseoutcomes()["leaked"] >= 1
    assert "stopping after 1 failures" in result.stdout.str()


def test_without_distribution_xdist_changes_nothing(run):
    result = run(MODULES, "-p", "xdist", "--dist", "no")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 7, "failed": 1, "leaked": 2}
