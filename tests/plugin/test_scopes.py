"""Engines of wider scope than a test. There is no vLLM here: a stand-in is recorded as an engine is."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("hasty")

ENGINE = """
from contextlib import contextmanager
from pytest_vllm_cleanup.engines.registry import CloseReport, State, registry

class Engine:
    def __init__(self, size=512 * MIB, kind="LLMEngine"):
        self.size = size
        self.handle = registry.begin(kind)
        for listener in registry.listeners:
            listener.before_build(self.handle)
        gpu.allocated += size
        for listener in registry.listeners:
            listener.after_build(self.handle)
        registry.attach(self.handle, self)
        self.handle.in_process = True
        self.handle.state = State.LIVE
    def close(self, leaving=0):
        gpu.allocated -= self.size - leaving
        registry.closed(self.handle, CloseReport())
"""

FIXTURE = """
@pytest.fixture(scope="{scope}")
def engine():
    engine = Engine()
    yield engine
    engine.close()
"""


@pytest.mark.parametrize("scope", ["class", "module", "package", "session"])
def test_an_engine_of_wider_scope_is_no_leak_of_the_tests_that_use_it(run, scope):
    result = run(
        ENGINE
        + FIXTURE.format(scope=scope)
        + """
pytestmark = pytest.mark.gpu_released
class TestIt:
    def test_first(self, engine):
        gpu.allocated += MIB
    def test_second(self, engine):
        pass
    def test_leaking(self, engine):
        gpu.allocated += 100 * MIB
    def test_last(self, engine):
        pass
def test_after():
    pass
"""
    )
    assert result.parseoutcomes() == {"passed": 5, "leaked": 1}
    assert [line.split(" left ")[0] for line in result.outlines if " left " in line] == [
        "test_inner.py::TestIt::test_leaking"
    ]


def test_a_live_engine_may_grow_when_it_first_works_and_nothing_else_may(run):
    result = run(
        ENGINE
        + FIXTURE.format(scope="class")
        + """
pytestmark = pytest.mark.gpu_released
class TestIt:
    def test_works(self, engine):
        gpu.allocated += 60 * MIB
    def test_idle(self, engine):
        pass
def test_alone():
    gpu.allocated += 60 * MIB
def test_own():
    kept = Engine(size=0)
    gpu.allocated += 60 * MIB
    kept.close()
"""
    )
    assert [line.split(" left ")[0] for line in result.outlines if " left " in line] == [
        "test_inner.py::test_alone",
        "test_inner.py::test_own",
    ]


def test_what_an_engine_of_wider_scope_leaves_is_charged_where_it_ends(run):
    result = run(
        ENGINE
        + """
@pytest.fixture(scope="class")
def engine():
    engine = Engine()
    yield engine
    engine.close(leaving=100 * MIB)
@pytest.mark.gpu_released
class TestIt:
    def test_first(self, engine):
        pass
    def test_last(self, engine):
        pass
""",
        "-v",
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    assert "100 MiB (104857600 bytes)" in next(line for line in result.outlines if "TestIt::test_last, left" in line)


def test_an_engine_that_its_own_test_leaves_alive_is_a_leak_and_is_closed(run):
    result = run(
        ENGINE
        + """
kept = []
@pytest.mark.gpu_released
def test_forgets():
    kept.append(Engine(size=0))
def test_closed():
    assert list(registry.handles()) == []
"""
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_forgets left an engine alive. Held by test_inner.py: module global kept[[]0] -> *. "
            "Make it with vllm_runner, or close it with *",
            "still alive: LLMEngine number 1 of test test_inner.py::test_forgets",
            "  held by test_inner.py: module global kept[[]0] -> Engine",
            "closed LLMEngine number 1 of test test_inner.py::test_forgets in * s, after the verdict",
        ]
    )


def test_an_engine_dropped_in_a_cycle_is_no_leak(run):
    result = run(
        ENGINE
        + """
import gc
@pytest.mark.gpu_released
def test_cycle():
    engine = Engine(size=0)
    engine.me = engine
    gc.freeze()
"""
    )
    assert result.parseoutcomes() == {"passed": 1}


def test_the_owner_is_the_innermost_fixture_that_is_being_set_up(run):
    result = run("""
from pytest_vllm_cleanup.engines.registry import registry
def owner():
    owner = registry.owner()
    return owner.node.rpartition("::")[2], owner.phase, owner.fixture, owner.scope
@pytest.fixture(scope="session")
def session():
    return owner()
@pytest.fixture(scope="module")
def module(session):
    return owner()
@pytest.fixture
def function(module, request):
    late = request.getfixturevalue("late")
    yield owner(), late
    assert owner() == ("test_it", "teardown", None, "function")
@pytest.fixture(scope="class")
def late():
    return owner()
@pytest.mark.gpu_released
def test_it(session, module, function):
    assert session == ("test_it", "setup", "session", "session")
    assert module == ("test_it", "setup", "module", "module")
    assert function == (("test_it", "setup", "function", "function"), ("test_it", "setup", "late", "class"))
    assert owner() == ("test_it", "call", None, "function")
""")
    assert result.parseoutcomes() == {"passed": 1}


def test_fixtures_of_an_unmarked_test_have_owners_too(run):
    result = run("""
from pytest_vllm_cleanup.engines.registry import registry
@pytest.fixture(scope="module")
def engine():
    return registry.owner()
def test_unmarked(engine):
    assert (engine.fixture, engine.scope) == ("engine", "module")
    assert registry.owner().is_test
@pytest.mark.gpu_released
def test_marked():
    pass
""")
    assert result.parseoutcomes() == {"passed": 2}
