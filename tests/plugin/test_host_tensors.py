"""Real tensors in host memory: who is named, and whether a leak that comes back is charged to another test."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("hasty")

CONFTEST = """
import os
from pytest_vllm_cleanup.engines import measure
from pytest_vllm_cleanup.memory import Gauge
from pytest_vllm_cleanup.memory.meters.host import HostMeter
def pytest_configure():
    measure._gauges[os.getpid()] = Gauge([HostMeter()], measure.our_processes)
"""
HEADER = """
import pytest, torch
pytestmark = pytest.mark.gpu_released
MIB = 1 << 20
KEPT = []
def ones(size):
    return torch.ones(size * MIB, dtype=torch.uint8)
"""


@pytest.fixture
def leaks(pytester, monkeypatch):
    """Runs a test module; returns the leaks, each as who is charged and who holds the memory."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_inner=HEADER + source)
        result = pytester.runpytest_subprocess("-p", "vllm_cleanup", "-p", "no:cacheprovider")
        found = []
        for line in result.outlines:
            if match := re.match(r"(?:test_inner.py::|\w+-scoped fixture ')(\w+).* left \d", line):
                holder = re.search(r"Held by (?:\S+: module global )?(.*?) -> ", line)
                found.append((match[1], holder[1] if holder else ""))
        return found

    return run


def test_an_earlier_leak_that_comes_back_hides_no_leak(leaks):
    assert leaks("""
def test_leaks():
    KEPT.append(ones(100))
def test_leaks_as_much():
    KEPT[0] = ones(100)
""") == [("test_leaks", "KEPT[0]"), ("test_leaks_as_much", "KEPT[0]")]


def test_pages_that_were_never_written_do_not_come_back(leaks):
    found = leaks("""
def test_leaks():
    KEPT.append(ones(100))
    KEPT.append(torch.empty(500 * MIB, dtype=torch.uint8))
def test_frees():
    KEPT.clear()
""")
    assert [name for name, _ in found] == ["test_leaks"]


def test_a_storage_that_was_emptied_and_filled_again_is_charged_once_each_time(leaks):
    assert leaks("""
def test_leaks():
    KEPT.append(ones(100))
def test_empties():
    KEPT[0].untyped_storage().resize_(0)
def test_leaks_again():
    KEPT[0].untyped_storage().resize_(100 * MIB)
    KEPT[0].fill_(1)
def test_drops():
    KEPT.clear()
""") == [("test_leaks", "KEPT[0]"), ("test_leaks_again", "KEPT[0]")]


def test_a_fixture_of_wider_scope_that_a_leaking_test_set_up_is_not_to_blame(leaks):
    assert leaks("""
@pytest.fixture(scope="session")
def table():
    return ones(150)
def test_leaks(table):
    KEPT.append(ones(100))
def test_uses(table):
    pass
""") == [("test_leaks", "KEPT[0]")]


def test_the_gradient_of_a_fixture_is_named_and_not_its_weights(leaks):
    assert leaks("""
@pytest.fixture(scope="module")
def model():
    yield torch.nn.Linear(5000, 5000, bias=False)
def test_leaks(model):
    model(torch.ones(1, 5000)).sum().backward()
def test_uses(model):
    pass
""") == [("test_leaks", "module-scoped fixture 'model' (test_inner.py:8)")]


def test_a_leak_of_something_else_is_not_pinned_on_a_tensor_of_some_bytes(leaks):
    assert leaks("""
def test_leaks():
    KEPT.append(bytearray(b"x") * (100 * MIB))
    KEPT.append(torch.ones(1))
""") == [("test_leaks", "")]


def test_very_many_small_tensors_that_leak_together_are_named(leaks):
    ((name, holder),) = leaks("""
def test_leaks():
    KEPT.append([torch.ones(256) for _ in range(200_000)])
def test_after():
    pass
""")
    assert name == "test_leaks"
    assert holder.startswith("KEPT[0][")
