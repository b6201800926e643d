"""What fixtures of wider scope hold, engine or not, and when they have to give it back."""

from __future__ import annotations

import pytest
from test_scopes import ENGINE, FIXTURE

pytestmark = pytest.mark.usefixtures("hasty")


def leaks(result):
    return [line.split(" left ")[0].rpartition("::")[2].rstrip(",") for line in result.outlines if " left " in line]


@pytest.mark.parametrize("scope", ["class", "module", "package", "session"])
def test_a_tensor_of_wider_scope_is_no_leak_of_the_tests_that_use_it(run, scope):
    result = run(f"""
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="{scope}")
def outer(request):
    tensor = Tensor(100 * MIB)
    request.getfixturevalue("inner")
    return tensor
@pytest.fixture(scope="{scope}")
def inner():
    return Tensor(50 * MIB)
class TestIt:
    def test_first(self, outer, inner):
        assert gpu.allocated == 150 * MIB
    def test_leaking(self, outer):
        gpu.allocated += 2 * MIB
    def test_last(self, inner):
        pass
def test_after():
    pass
""")
    assert leaks(result) == ["test_leaking"]


def test_what_a_fixture_of_wider_scope_leaves_is_charged_where_it_ends(run):
    result = run("""
kept = []
@pytest.fixture(scope="class")
def tensor():
    kept.append(Tensor(100 * MIB))
@pytest.mark.gpu_released
class TestIt:
    def test_first(self, tensor):
        pass
    def test_last(self, tensor):
        pass
""")
    assert leaks(result) == ["test_last"]


def test_an_engine_in_a_fixture_is_counted_once(run):
    result = run(
        ENGINE
        + """
@pytest.fixture(scope="class")
def engine():
    engine = Engine()
    tensor = Tensor(100 * MIB)
    yield engine
    engine.close()
@pytest.mark.gpu_released
class TestIt:
    def test_first(self, engine):
        pass
    def test_leaking(self, engine):
        gpu.allocated += 65 * MIB
    def test_last(self, engine):
        pass
"""
    )
    assert leaks(result) == ["test_leaking"]


def test_an_engine_that_outlives_its_fixture_is_a_leak_where_that_ends_and_is_closed(run):
    result = run(
        ENGINE
        + """
kept = []
@pytest.fixture(scope="class")
def engine():
    kept.append(Engine())
@pytest.mark.gpu_released
class TestIt:
    def test_first(self, engine):
        pass
    def test_last(self, engine):
        pass
def test_closed():
    assert list(registry.handles()) == []
"""
    )
    assert result.parseoutcomes() == {"passed": 3, "leaked": 1}
    assert leaks(result) == ["test_last"]
    result.stdout.fnmatch_lines(["closed LLMEngine number 1 of class-scoped fixture 'engine' (set up for *"])


def test_an_engine_that_an_unchecked_test_set_up_may_work_in_a_checked_one(run):
    result = run(
        ENGINE
        + FIXTURE.format(scope="module")
        + """
import functools
@functools.cache
def cached():
    return Engine()
def test_sets_up(engine):
    cached()
@pytest.mark.gpu_released
def test_works(engine):
    gpu.allocated += 60 * MIB
@pytest.mark.gpu_released
def test_works_too():
    gpu.allocated += 60 * MIB
@pytest.mark.gpu_released
def test_leaks():
    gpu.allocated += 130 * MIB
"""
    )
    assert leaks(result) == ["test_leaks"]


def test_an_engine_from_before_this_plugin_looked_may_work(run):
    result = run(
        ENGINE
        + """
early = registry.begin("LLMEngine")
early.state = State.LIVE
@pytest.mark.gpu_released
def test_works():
    gpu.allocated += 60 * MIB
"""
    )
    assert result.parseoutcomes() == {"passed": 1}


FACTORY = """
import sys, types, unittest.mock
from pytest_vllm_cleanup.runners import factory
closed = []
class Runner:
    errors = []
    def __init__(self, name):
        self.name = name
    def close(self):
        closed.append(self.name)
        return self
factory.VllmRunner = Runner
"""


def test_engines_made_in_a_teardown_are_closed_after_it(run):
    result = run(
        FACTORY
        + """
@pytest.fixture
def late(vllm_runner_factory):
    yield
    vllm_runner_factory("first")
    vllm_runner_factory("second")
    assert closed == []
def test_it(late):
    pass
def test_next():
    assert closed == ["second", "first"]
"""
    )
    assert result.parseoutcomes() == {"passed": 2}


def test_one_that_is_no_engine_does_not_keep_the_others_open(run):
    result = run(
        FACTORY
        + """
class Mock(Runner):
    def close(self):
        raise TypeError("close_engine() takes an LLM")
def test_it(vllm_runner, monkeypatch):
    vllm_runner("first")
    monkeypatch.setattr(factory, "VllmRunner", Mock)
    vllm_runner("second")
def test_next():
    assert closed == ["first"]
"""
    )
    assert result.parseoutcomes() == {"passed": 2, "warnings": 1}
    assert "closing an engine: TypeError: close_engine() takes an LLM" in result.stdout.str()


def test_all_engines_are_closed_where_warnings_are_errors(run):
    result = run(
        FACTORY
        + """
Runner.errors = ["a step that failed"]
def test_it(vllm_runner):
    vllm_runner("first")
    vllm_runner("second")
def test_next():
    assert closed == ["second", "first"]
""",
        "-W",
        "error",
    )
    assert result.parseoutcomes() == {"passed": 2, "errors": 1}
    assert "EngineCleanupWarning: closing an engine: a step that failed" in result.stdout.str()


def test_what_a_fixture_leaves_in_the_instances_of_earlier_tests_is_no_leak(run):
    result = run("""
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="class")
def made():
    return Tensor()
class TestIt:
    @pytest.fixture(autouse=True)
    def use(self, made):
        self.tensor = made
    def test_one(self):
        assert self.tensor
    def test_other(self):
        assert self.tensor
def test_after():
    pass
""")
    assert result.parseoutcomes() == {"passed": 3}
