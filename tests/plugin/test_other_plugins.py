from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("hasty")


def test_a_leak_that_stays_a_leak_when_repeated_fails(run):
    pytest.importorskip("pytest_rerunfailures")
    result = run(
        """
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 2 * MIB
""",
        "-p",
        "rerunfailures",
        "--reruns=1",
    )
    assert result.ret == 1
    assert result.parseoutcomes()["leaked"] == 1
    assert result.parseoutcomes()["rerun"] == 1
    assert result.stdout.str().count("test_leak left") == 1


def test_a_leak_that_is_gone_when_repeated_counts_as_repeated(run):
    pytest.importorskip("pytest_rerunfailures")
    result = run(
        """
times = []
@pytest.mark.gpu_released
def test_leak():
    times.append(1)
    if len(times) == 1:
        gpu.allocated += 2 * MIB
""",
        "-p",
        "rerunfailures",
        "--reruns=1",
    )
    assert result.ret == 0
    assert "leaked" not in result.parseoutcomes()
    assert result.parseoutcomes()["rerun"] == 1


@pytest.mark.parametrize("failure", ["assert 0", "pytest.fail('own')"])
def test_a_repeated_test_starts_from_a_clean_baseline(run, failure):
    pytest.importorskip("pytest_rerunfailures")
    result = run(
        f"""
times = []
class TestIt:
    @pytest.mark.gpu_released
    def test_flaky(self):
        self.tensor = tensor = Tensor()
        times.append(1)
        if len(times) == 1:
            {failure}
    @pytest.mark.gpu_released
    def test_next(self):
        assert gpu.allocated == 0
""",
        "-p",
        "rerunfailures",
        "--reruns=1",
    )
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 2, "rerun": 1}


def test_a_test_that_runs_out_of_time_keeps_its_failure_and_is_checked(run):
    pytest.importorskip("pytest_timeout")
    result = run(
        """
import time
@pytest.mark.gpu_released
@pytest.mark.timeout(0.3, func_only=True)
def test_slow():
    tensor = Tensor()
    gpu.allocated += 3 * MIB
    time.sleep(30)
def test_next():
    assert gpu.allocated == 3 * MIB
""",
        "-p",
        "timeout",
    )
    assert result.parseoutcomes() == {"failed": 1, "passed": 1, "leaked": 1}
    assert "Timeout" in result.stdout.str()
    assert "left 3 MiB" in result.stdout.str()
