"""How a verdict goes together with what else may become of a test."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("hasty")


def test_skips_and_expected_failures_keep_their_status(run):
    result = run(
        """
pytestmark = pytest.mark.gpu_released
@pytest.fixture
def skipping():
    pytest.skip("in the fixture")
def test_skip():
    tensor = Tensor()
    pytest.skip("in the test")
def test_skip_in_fixture(skipping):
    pass
@pytest.mark.skip
def test_skip_by_mark():
    pass
@pytest.mark.xfail
def test_xfail():
    tensor = Tensor()
    assert not tensor
@pytest.mark.xfail
def test_xpass():
    tensor = Tensor()
"""
    )
    assert result.ret == 0
    assert result.parseoutcomes() == {"skipped": 3, "xfailed": 1, "xpassed": 1}


def test_skipped_tests_leak_too(run):
    result = run(
        """
pytestmark = pytest.mark.gpu_released
@pytest.fixture
def skipping():
    gpu.allocated += 2 * MIB
    pytest.skip("in the fixture")
def test_skip():
    gpu.allocated += 2 * MIB
    pytest.skip("in the test")
def test_skip_in_fixture(skipping):
    pass
"""
    )
    assert result.ret == 1
    assert result.parseoutcomes() == {"skipped": 2, "leaked": 2}


def test_a_leak_is_never_an_expected_failure(run):
    result = run(
        """
pytestmark = pytest.mark.gpu_released
@pytest.mark.xfail
def test_xfail():
    gpu.allocated += 2 * MIB
    raise ValueError
@pytest.mark.xfail
def test_xpass():
    gpu.allocated += 2 * MIB
"""
    )
    assert result.ret == 1
    assert result.parseoutcomes() == {"xfailed": 1, "xpassed": 1, "leaked": 2}


def test_a_failing_fixture_is_an_error_and_may_leak_beside_it(run):
    result = run(
        """
pytestmark = pytest.mark.gpu_released
@pytest.fixture
def broken():
    tensor = Tensor()
    raise ValueError("broken fixture")
@pytest.fixture
def leaking():
    gpu.allocated += 2 * MIB
    raise ValueError("leaking fixture")
def test_clean(broken):
    pass
def test_leaking(leaking):
    pass
"""
    )
    assert result.parseoutcomes() == {"errors": 2, "leaked": 1}
    output = result.stdout.str()
    assert output.index("ValueError: broken fixture") < output.index("ValueError: leaking fixture")
    assert output.index("ValueError: leaking fixture") < output.index("test_leaking left 2 MiB")


def test_a_failing_test_keeps_its_failure_first_and_whole_and_the_leak_is_beside_it(run):
    result = run("""
@pytest.mark.gpu_released
def test_both():
    gpu.allocated += 2 * MIB
    expected = 41
    assert expected == 42, "the user's own failure"
""")
    assert result.ret == 1
    assert result.parseoutcomes() == {"failed": 1, "leaked": 1}
    result.stdout.fnmatch_lines(
        [
            "*= FAILURES =*",
            '>       assert expected == 42, "the user\'s own failure"',
            "E       AssertionError: the user's own failure",
            "E       assert 41 == 42",
            "*= LEAKS =*",
            "test_inner.py::test_both left 2 MiB *",
            "FAILED test_inner.py::test_both - AssertionError: the user's own failure",
        ]
    )


def test_a_failing_teardown_keeps_its_failure_first_and_the_leak_is_beside_it(run):
    result = run("""
@pytest.fixture
def rude():
    yield
    gpu.allocated += 2 * MIB
    raise ValueError("the user's own teardown")
@pytest.mark.gpu_released
def test_both(rude):
    pass
""")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 1, "errors": 1}
    result.stdout.fnmatch_lines(
        [
            "*= ERRORS =*",
            "E       ValueError: the user's own teardown",
            "*= LEAKS =*",
            "test_inner.py::test_both left 2 MiB *",
            "ERROR test_inner.py::test_both - ValueError: the user's own teardown",
        ]
    )


@pytest.mark.parametrize("option", ["-x", "--maxfail=1"])
def test_a_leak_counts_as_a_failure_for_maxfail(run, option):
    result = run(
        """
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 2 * MIB
def test_next():
    pass
""",
        option,
    )
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])


def test_each_parameter_set_has_its_own_verdict(run):
    result = run(
        """
@pytest.mark.gpu_released
@pytest.mark.parametrize("stays", [0, 2, 0, 3])
def test_it(stays):
    gpu.allocated += stays * MIB
""",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 4, "leaked": 2}
    leaked = [line.split()[0] for line in result.outlines if "LEAKED" in line]
    assert leaked == ["test_inner.py::test_it[2]", "test_inner.py::test_it[3]"]


def test_a_leak_is_charged_once(run):
    result = run(
        """
def test_leak():
    gpu.allocated += 2 * MIB
def test_innocent():
    pass
""",
        "--vllm-cleanup-check=all",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    assert "test_leak" in next(line for line in result.outlines if "LEAKED" in line)


@pytest.mark.skipif(
    tuple(map(int, pytest.__version__.split(".")[:2])) < (8, 2),
    reason="pytest before 8.2 keeps the first instance of a unittest class as long as the class lasts",
)
def test_unittest_classes_are_checked(run):
    result = run("""
import unittest
@pytest.mark.gpu_released
class TestOld(unittest.TestCase):
    def setUp(self):
        self.kept = Tensor()
    def test_leak(self):
        gpu.allocated += 2 * MIB
    def test_clean(self):
        tensor = Tensor()
    def test_failing_clean(self):
        tensor = Tensor()
        self.assertEqual(1, 2)
    def tearDown(self):
        pass
""")
    assert result.parseoutcomes() == {"passed": 2, "failed": 1, "leaked": 1}
    assert "TestOld::test_leak left" in next(line for line in result.outlines if " left " in line)
