"""A leak is charged once: to the test that made it, or by name to the fixture of wider scope that did."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.usefixtures("hasty")


def sentences(result):
    return [line for line in result.outlines if re.search(r" left \d", line)]


def culprits(result):
    """The fixture or test that each leak is charged to, by its bare name."""
    found = []
    for line in sentences(result):
        fixture = re.match(r"\w+-scoped fixture '(\w+)' \(set up for [^)]*\), which ended with [^,]*, left ", line)
        found.append(fixture[1] if fixture else line.split(" left ")[0].rpartition("::")[2])
    return found


@pytest.mark.parametrize("scope", ["class", "module", "package", "session"])
def test_a_fixture_that_leaks_is_named_and_not_its_last_test(run, scope):
    result = run(f"""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="{scope}")
def table():
    kept.append(Tensor(100 * MIB))
    yield
class TestIt:
    def test_first(self, table):
        pass
    def test_last(self, table):
        pass
""")
    assert culprits(result) == ["table"]
    assert sentences(result)[0].startswith(
        f"{scope}-scoped fixture 'table' (set up for test_inner.py::TestIt::test_first), which ended with "
        "test_inner.py::TestIt::test_last, left 100 MiB (104857600 bytes) on cuda:0 by torch allocator "
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


def test_of_several_fixtures_that_end_together_the_one_that_leaks_is_named(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def first():
    tensor = Tensor(10 * MIB)
    yield tensor
@pytest.fixture(scope="module")
def leaking(first):
    kept.append(Tensor(100 * MIB))
    yield
@pytest.fixture(scope="module")
def last(leaking):
    tensor = Tensor(10 * MIB)
    yield tensor
def test_it(last):
    pass
""")
    assert culprits(result) == ["leaking"]


def test_a_fixture_that_leaks_only_in_its_teardown_is_named(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def table():
    yield
    kept.append(Tensor(100 * MIB))
def test_it(table):
    pass
""")
    assert culprits(result) == ["table"]


def test_a_test_that_leaks_while_a_clean_fixture_ends_with_it_is_charged_itself(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def table():
    tensor = Tensor(100 * MIB)
    yield tensor
def test_it(table):
    kept.append(Tensor(10 * MIB))
""")
    assert culprits(result) == ["test_it"]


def test_garbage_of_the_last_test_is_no_leak_of_it(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def table():
    kept.append(Tensor(100 * MIB))
    yield
def test_it(table):
    cycle = [Tensor(10 * MIB)]
    cycle.append(cycle)
""")
    assert culprits(result) == ["table"]


def test_a_fixture_of_a_checked_test_is_checked_where_an_unchecked_test_ends_it(run):
    result = run("""
kept = []
@pytest.fixture(scope="module")
def table():
    kept.append(Tensor(100 * MIB))
    yield
@pytest.mark.gpu_released
def test_checked(table):
    pass
def test_unchecked(table):
    kept.append(Tensor(10 * MIB))
""")
    assert culprits(result) == ["table"]
    assert "left 100 MiB" in sentences(result)[0]


def test_a_fixture_of_unchecked_tests_alone_is_not_checked(run):
    result = run("""
kept = []
@pytest.fixture(scope="class")
def table():
    kept.append(Tensor(100 * MIB))
    yield
class TestUnchecked:
    def test_it(self, table):
        pass
@pytest.mark.gpu_released
def test_checked():
    pass
""")
    assert result.parseoutcomes() == {"passed": 2}


def test_what_a_fixture_of_an_unchecked_test_gives_back_hides_no_leak(run):
    result = run("""
kept = []
@pytest.fixture(scope="module")
def table():
    tensor = Tensor(100 * MIB)
    yield tensor
def test_unchecked(table):
    pass
@pytest.mark.gpu_released
def test_leaks(table):
    kept.append(Tensor(10 * MIB))
""")
    assert culprits(result) == ["test_leaks"]


def test_a_leak_that_stays_is_charged_once(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
def test_leaks():
    kept.append(Tensor(100 * MIB))
def test_clean():
    Tensor(100 * MIB)
def test_leaks_too():
    kept.append(Tensor(10 * MIB))
def test_clean_too():
    pass
""")
    assert culprits(result) == ["test_leaks", "test_leaks_too"]


def test_a_fixture_set_up_again_for_another_parameter_is_charged_for_its_own(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module", params=["clean", "leaking"])
def table(request):
    tensor = Tensor(100 * MIB)
    if request.param == "leaking":
        kept.append(tensor)
    yield tensor
def test_it(table):
    pass
""")
    assert culprits(result) == ["table"]
    assert "test_it[leaking]" in sentences(result)[0]


PARAMETERS = """
kept = []
@pytest.fixture(scope="module", params=[1, 2])
def server(request):
    tensor = Tensor(100 * MIB)
    yield tensor
    if request.param == 1:
        kept.append(tensor)
"""


def test_a_fixture_that_ends_for_its_next_parameter_is_named(run):
    result = run(
        PARAMETERS
        + """
pytestmark = pytest.mark.gpu_released
def test_it(server):
    pass
"""
    )
    assert culprits(result) == ["server"]
    assert ", which ended with test_inner.py::test_it[2], left 100 MiB" in sentences(result)[0]


def test_a_fixture_that_ends_in_the_setup_of_an_unchecked_test_is_named_and_that_test_is_not(run):
    result = run(
        PARAMETERS
        + """
@pytest.mark.gpu_released
def test_checked(server):
    pass
def test_unchecked(server):
    kept.append(Tensor(10 * MIB))
""",
        "-k",
        "checked[1] or unchecked[2]",
    )
    assert culprits(result) == ["server"]
    assert "100 MiB on cuda:0 by module-scoped fixture 'server'" in sentences(result)[0]


def test_what_the_test_leaks_after_a_fixture_ended_in_its_setup_is_its_own(run):
    result = run(
        PARAMETERS
        + """
pytestmark = pytest.mark.gpu_released
def test_it(server, request):
    if request.node.name == "test_it[2]":
        kept.append(Tensor(10 * MIB))
"""
    )
    (sentence,) = sentences(result)
    assert "test_it[2] left 110 MiB" in sentence
    assert (
        "Of this: 10 MiB on cuda:0 by the test itself, 100 MiB on cuda:0 by module-scoped fixture 'server'" in sentence
    )


def test_a_fixture_that_fails_in_its_setup_is_charged_what_it_leaves(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def broken():
    kept.append(Tensor(100 * MIB))
    raise RuntimeError("own")
def test_first(broken):
    pass
def test_last(broken):
    pass
""")
    assert culprits(result) == ["broken"]


def test_a_test_and_its_fixtures_are_each_charged_their_own(run):
    result = run("""
kept = []
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="class")
def big():
    kept.append(Tensor(1000 * MIB))
    yield
class TestIt:
    def test_small(self, big):
        kept.append(Tensor(2 * MIB))
""")
    (sentence,) = sentences(result)
    assert "test_small left 1002 MiB" in sentence
    assert "Of this: 2 MiB on cuda:0 by the test itself, 1000 MiB on cuda:0 by class-scoped fixture 'big'" in sentence


@pytest.mark.parametrize("limits", ["tolerance='1 GiB'", "devices=1"])
def test_the_limits_of_the_last_test_are_not_those_of_the_fixture(run, limits):
    result = run(f"""
kept = []
@pytest.fixture(scope="class")
def table():
    kept.append(Tensor(500 * MIB))
    yield
class TestIt:
    @pytest.mark.gpu_released
    def test_first(self, table):
        pass
    @pytest.mark.gpu_released({limits})
    def test_last(self, table):
        kept.append(Tensor(200 * MIB))
""")
    (sentence,) = sentences(result)
    assert "500 MiB on cuda:0 by class-scoped fixture 'table'" in sentence or culprits(result) == ["table"]


def test_setup_methods_go_by_their_names(run):
    result = run("""
kept = []
@pytest.mark.gpu_released
class TestIt:
    @classmethod
    def setup_class(cls):
        kept.append(Tensor(100 * MIB))
    def test_it(self):
        pass
""")
    (sentence,) = sentences(result)
    assert sentence.startswith("setup_class of TestIt (set up for test_inner.py::TestIt::test_it), which ended with ")


def test_a_time_limit_that_ends_the_search_does_not_lose_the_leak(run):
    result = run(
        """
import time
from pytest_vllm_cleanup.checks import investigate
kept = []

class TimeLimit(BaseException):
    pass

def endless(*_):
    raise pytest.fail.Exception("Timeout >1s")

investigate.who_holds = endless

@pytest.mark.gpu_released
def test_leaks():
    kept.append(Tensor(100 * MIB))
""",
        "--junitxml=junit.xml",
    )
    assert "Timeout >1s" in result.stdout.str()
    assert any("left 100 MiB" in line for line in result.outlines)


def test_under_a_debugger_a_failing_test_is_not_judged(run):
    result = run(
        """
import pdb
@pytest.mark.gpu_released
def test_fails():
    tensor = Tensor(100 * MIB)
    assert not tensor
""",
        "--pdb",
        "--pdbcls=bug:Silent",
        bug="""
class Silent:
    def __init__(self, *_, **__):
        pass
    def reset(self):
        pass
    def interaction(self, *_):
        pass
    quitting = False
    def __getattr__(self, name):
        return lambda *_, **__: None
""",
    )
    assert sentences(result) == []
    assert "what pytest keeps of the failed test was left to the debugger" in result.stdout.str()
