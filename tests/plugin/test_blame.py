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
