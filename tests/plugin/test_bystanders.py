"""What belongs to others is left whole: their fixtures, their hooks, their skips, their imports."""

from __future__ import annotations

import pytest
from test_scopes import ENGINE

pytestmark = pytest.mark.usefixtures("hasty")


def test_a_fixture_that_yields_after_it_caught_an_exception_is_not_closed_with_it(run):
    result = run("""
closed = []
@pytest.fixture(scope="module")
def error():
    try:
        raise ValueError("caught")
    except ValueError as problem:
        caught = problem
    try:
        yield caught
    finally:
        closed.append(True)
@pytest.mark.gpu_released
def test_fails(error):
    tensor = Tensor()
    raise RuntimeError("own") from error
def test_next(error):
    assert closed == []
""")
    assert result.parseoutcomes() == {"failed": 1, "passed": 1}


@pytest.mark.parametrize("shape", ["finally: pass", "except KeyError: pass"])
def test_the_locals_of_a_generator_that_is_over_are_let_go(run, shape):
    result = run(f"""
@pytest.fixture
def broken():
    yield
    tensor = Tensor()
    try:
        raise ValueError("own")
    {shape}
@pytest.mark.gpu_released
def test_it(broken):
    pass
""")
    assert result.parseoutcomes() == {"passed": 1, "errors": 1}
    assert " left " not in result.stdout.str()


HOOK = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        assert item.funcargs["page"] == "page"
        assert item.instance.seen == 1
    return report
"""


def test_hooks_of_others_find_fixtures_and_instance_of_a_test_that_took_nothing(run):
    result = run(
        """
@pytest.fixture
def page():
    return "page"
class TestIt:
    @pytest.mark.gpu_released
    def test_it(self, page):
        self.seen = 1
""",
        conftest=HOOK,
    )
    assert "INTERNALERROR" not in result.stdout.str()
    assert result.parseoutcomes() == {"passed": 1}


def test_a_fixture_that_failed_for_several_tests_shows_its_locals_each_time(run):
    result = run(
        """
@pytest.fixture(scope="module")
def broken():
    answer = "forty" + "-two"
    raise ValueError("own")
@pytest.mark.gpu_released
def test_first(broken):
    pass
@pytest.mark.gpu_released
def test_second(broken):
    pass
""",
        "--showlocals",
    )
    assert result.outlines.count("answer     = 'forty-two'") == 2


def test_a_skipped_test_may_name_devices_that_are_not_there(run):
    result = run("""
@pytest.mark.skipif(True, reason="needs eight GPUs")
@pytest.mark.gpu_released(devices="cuda:7")
def test_it():
    pass
""")
    assert result.parseoutcomes() == {"skipped": 1}


@pytest.mark.parametrize("stand_in", ["types.ModuleType(name)", "unittest.mock.MagicMock(name=name)"])
def test_a_stand_in_for_vllm_does_not_end_the_checks(run, stand_in):
    result = run(
        """
@pytest.mark.gpu_released
def test_leaks():
    gpu.allocated += 2 * MIB
""",
        conftest=f"""
import sys, types, unittest.mock
for part in ("", ".v1", ".v1.engine", ".v1.engine.llm_engine", ".v1.engine.async_llm", ".v1.engine.core"):
    name = "vllm" + part
    sys.modules[name] = {stand_in}
""",
    )
    assert result.parseoutcomes()["leaked"] == 1


def test_importing_a_package_that_only_looks_like_vllm_works(run, pytester):
    folder = pytester.mkpydir("vllm")
    for name in ("v1", "v1/engine"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "v1/engine/llm_engine.py").write_text("class LLMEngine:\n    pass\n")
    result = run("""
@pytest.mark.gpu_released
def test_it():
    from vllm.v1.engine.llm_engine import LLMEngine
    assert LLMEngine()
""")
    assert result.parseoutcomes()["passed"] == 1
    assert "failed" not in result.parseoutcomes()


def test_a_run_inside_a_run_leaves_the_owners_of_the_outer_one_alone(run):
    result = run(
        """
from pytest_vllm_cleanup.engines.registry import registry
@pytest.mark.gpu_released
def test_it(pytester):
    pytester.makepyfile("import pytest\\n@pytest.mark.gpu_released\\ndef test_inner(): pass")
    pytester.inline_run("-p", "vllm_cleanup").assertoutcome(passed=1)
    assert registry.owner().node.endswith("::test_it")
""",
        "-p",
        "pytester",
    )
    assert result.parseoutcomes() == {"passed": 1}


def test_a_timeout_that_ends_the_wait_for_memory_leaves_no_engine_open(run, monkeypatch):
    pytest.importorskip("pytest_timeout")
    monkeypatch.delenv("PYTEST_VLLM_CLEANUP_TIMEOUT")
    result = run(
        ENGINE
        + """
kept = []
@pytest.mark.gpu_released
@pytest.mark.timeout(1)
def test_slow():
    kept.append(Engine(size=0))
    gpu.children += 100 * MIB
def test_closed():
    assert list(registry.handles()) == []
""",
        "-p",
        "timeout",
    )
    assert result.parseoutcomes() == {"passed": 2, "errors": 1}
    assert "Timeout" in result.stdout.str()


def test_a_leak_of_a_unittest_method_is_reported(run):
    result = run("""
import unittest
class TestIt(unittest.TestCase):
    @pytest.mark.gpu_released
    def test_it(self):
        gpu.allocated += 2 * MIB
        with self.subTest(number=1):
            assert 0, "own"
""")
    assert result.parseoutcomes()["leaked"] == 1
    assert "INTERNALERROR" not in result.stdout.str()
