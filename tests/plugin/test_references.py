from __future__ import annotations

import sys

import pytest

from pytest_vllm_cleanup.checks import references

pytestmark = pytest.mark.usefixtures("hasty")

HOLDERS = {
    "locals": """
def test_it():
    tensor = Tensor()
    raise ValueError("own")
""",
    "assertion": """
def helper(tensor):
    assert tensor is None, "own"
def test_it():
    helper(Tensor())
""",
    "cause": """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    try:
        inner()
    except KeyError as error:
        raise ValueError("own") from error
""",
    "context": """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    try:
        inner()
    except KeyError:
        raise ValueError("own")
""",
    "suppressed_context": """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    try:
        inner()
    except KeyError:
        raise ValueError("own") from None
""",
    "xfail": """
@pytest.mark.xfail
def test_it():
    tensor = Tensor()
    raise ValueError("own")
""",
    "pytest_fail": """
def test_it():
    tensor = Tensor()
    pytest.fail("own")
""",
    "funcargs": """
@pytest.fixture
def tensor():
    return Tensor()
def test_it(tensor):
    raise ValueError("own")
""",
    "fixture": """
@pytest.fixture
def tensor():
    tensor = Tensor()
    raise ValueError("own")
def test_it(tensor):
    pass
""",
    "teardown": """
@pytest.fixture
def tensor():
    tensor = Tensor()
    yield tensor
    raise ValueError("own")
def test_it(tensor):
    pass
""",
    "unittest": """
import unittest
class TestIt(unittest.TestCase):
    def test_it(self):
        self.tensor = tensor = Tensor()
        raise ValueError("own")
""",
    "class_instance": """
class TestIt:
    def test_it(self):
        self.tensor = Tensor()
        raise ValueError("own")
""",
    "class_instance_of_a_passing_test": """
class TestIt:
    def test_it(self):
        self.tensor = Tensor()
    def test_own(self):
        assert not hasattr(self, "tensor"), "own"
        raise ValueError("own")
""",
    "parameter": """
@pytest.mark.parametrize("number", [1])
def test_it(number):
    tensor = Tensor()
    assert number == 2, "own"
""",
}
if sys.version_info >= (3, 11):
    HOLDERS["group"] = """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    errors = []
    for _ in range(2):
        try:
            inner()
        except KeyError as error:
            errors.append(error)
    raise ExceptionGroup("own", errors)
"""


def failure_text(result):
    """What pytest says of the test itself, without what differs from run to run."""
    lines, wanted = [], False
    for line in result.outlines:
        if line.startswith("==="):
            wanted = "FAILURES" in line or "ERRORS" in line
        # The frames of pytest and pluggy are the same; addresses of objects are not.
        if wanted:
            lines.append(line.split(" object at 0x")[0])
    return lines


def test_what_only_a_failed_test_holds_is_no_leak_and_its_failure_text_is_whole(run):
    start = "import gc\ngc.disable()\npytestmark = pytest.mark.gpu_released\n"
    modules = {f"test_{name}": start + source for name, source in HOLDERS.items()}
    result = run(modules, "--showlocals")
    unchecked = run(modules, "--showlocals", "--vllm-cleanup-check=off")
    leaks = [line.split(" left ")[0] for line in result.outlines if " left " in line]
    assert leaks == []
    assert result.parseoutcomes() == unchecked.parseoutcomes()
    # Two modules have a test that passes beside what fails.
    assert sum(result.parseoutcomes().values()) == len(HOLDERS) + 2
    assert failure_text(result) == failure_text(unchecked)
    assert sum("own" in line and line.startswith("E  ") for line in failure_text(result)) >= 13


def test_what_is_held_elsewhere_too_is_a_leak(run):
    result = run("""
kept = []
@pytest.mark.gpu_released
def test_it():
    tensor = Tensor()
    kept.append(tensor)
    raise ValueError("own")
""")
    assert result.parseoutcomes() == {"failed": 1, "leaked": 1}


LAST = """
import sys
def pytest_sessionfinish():
    error = getattr(sys, "last_value", None)
    names = []
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        names += trace.tb_frame.f_locals
        trace = trace.tb_next
    print("\\nLAST", type(error).__name__, "tensor" in names)
"""
FAILING = """
@pytest.mark.gpu_released
def test_it():
    tensor = Tensor()
    raise ValueError("own")
"""


def last(result):
    return next(line for line in result.outlines if line.startswith("LAST"))


def test_the_last_exception_is_forgotten(run):
    assert last(run(FAILING, "-s", conftest=LAST)) == "LAST NoneType False"


def test_the_last_exception_of_an_unmarked_test_is_left_alone(run):
    source = FAILING.replace("@pytest.mark.gpu_released", "@pytest.mark.gpu_released(check=False)")
    assert last(run(source, "-s", conftest=LAST)) == "LAST ValueError True"


SILENT_DEBUGGER = """
import pdb
class Silent(pdb.Pdb):
    def interaction(self, frame, traceback):
        print("\\nDEBUGGING", "tensor" in self.locals_of(traceback))
    def locals_of(self, problem):
        trace = getattr(problem, "__traceback__", problem)
        while trace.tb_next is not None:
            trace = trace.tb_next
        return trace.tb_frame.f_locals
"""


def test_nothing_is_cleared_under_a_debugger(run, pytester):
    pytester.makepyfile(silent=SILENT_DEBUGGER)
    result = run(FAILING, "--pdb", "--pdbcls=silent:Silent", conftest=LAST)
    assert "DEBUGGING True" in result.outlines
    assert last(result) == "LAST ValueError True"


def test_a_chain_that_bites_its_own_tail_ends():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    assert list(references.chain(first)) == [first, second]
