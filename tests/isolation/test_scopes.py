"""Fixtures of wider scope that other tests have set up in the process of the run, beside isolated tests."""

from __future__ import annotations

import pytest

CONFTEST = """
import os, pytest

@pytest.fixture(scope="session")
def session():
    note("session up"); yield; note("session down")

def note(text):
    with open("notes.txt", "a") as file:
        file.write(f"{text} {'here' if os.environ['RUN'] == str(os.getpid()) else 'there'}\\n")

def pytest_configure(config):
    if "RUN" not in os.environ:
        os.environ["RUN"] = str(os.getpid())

@pytest.fixture(scope="module")
def module(session, request):
    note(f"{request.module.__name__} up"); yield; note(f"{request.module.__name__} down")

@pytest.fixture(scope="class")
def cls(module):
    note("class up"); yield; note("class down")

@pytest.fixture
def function(module):
    note("function up"); yield; note("function down")

def pytest_runtest_logreport(report):
    if report.when == "call":
        note(report.nodeid.partition("::")[2])
"""
MODULES = {
    "conftest.py": CONFTEST,
    "test_a.py": """
import pytest

@pytest.mark.vllm_isolated
def test_a1(module, function): pass

class TestA:
    def test_a2(self, cls): pass

    @pytest.mark.vllm_isolated
    def test_a3(self, cls): pass

    def test_a4(self, cls, function): pass

@pytest.mark.vllm_isolated
def test_a5(module): pass
""",
    "test_b.py": """
import pytest

@pytest.mark.vllm_isolated
def test_b1(): pass

@pytest.mark.vllm_isolated
def test_b2(session): pass
""",
    "test_c.py": """
def test_c1(module): pass
""",
    "test_d.py": """
import pytest

def test_d1(module): pass

@pytest.mark.vllm_isolated
def test_d2(): pass
""",
}


def there(*lines):
    return [f"{line} there" for line in lines]


def here(*lines):
    return [f"{line} here" for line in lines]


@pytest.fixture(scope="module")
def run(folder_factory):
    folder = folder_factory(MODULES)
    return folder.run("-v"), (folder.path / "notes.txt").read_text().splitlines()


def test_fixtures_end_where_they_were_set_up_and_in_time(run):
    outcome, notes = run
    assert outcome.counts == {"passed": 10}
    up = ("session up", "test_a up")
    assert [line for line in notes if line.endswith(" here")] == here(
        "test_a1",
        *up,
        "class up",
        "TestA::test_a2",
        "TestA::test_a3",
        "function up",
        "TestA::test_a4",
        "function down",
        "class down",
        "test_a5",
        "test_a down",
        "test_b1",
        "test_b2",
        "test_c up",
        "test_c1",
        "test_c down",
        "test_d up",
        "test_d1",
        "test_d2",
        "test_d down",
        "session down",
    )


def test_each_isolated_test_has_its_own(run):
    _, notes = run
    assert [line for line in notes if line.endswith(" there")] == there(
        *("session up", "test_a up", "function up", "test_a1", "function down", "test_a down", "session down"),
        *("session up", "test_a up", "class up", "TestA::test_a3", "class down", "test_a down", "session down"),
        *("session up", "test_a up", "test_a5", "test_a down", "session down"),
        "test_b1",
        *("session up", "test_b2", "session down"),
        "test_d2",
    )


def test_the_notice_names_each_fixture_once(run):
    outcome, _ = run
    line = outcome.line("set up again")
    for name in ("session (session scope, ", "module (module scope, ", "cls (class scope, "):
        assert line.count(name) == 1
    assert "function" not in line.replace("function scope", "")


BROKEN = """
import pytest

@pytest.fixture(scope="module")
def broken():
    yield
    raise ValueError("at its end")

def test_here(broken): pass

@pytest.mark.vllm_isolated
def test_isolated(record_property): record_property("kept", 1)

"""


def test_an_error_at_the_end_of_a_fixture_is_reported_with_the_isolated_test_that_was_the_last(folder):
    folder = folder({"test_a.py": BROKEN, "test_b.py": "def test_b(): pass\n"}, copies=["recorder.py", "helpers.py"])
    run = folder.run("-ra", "-p", "recorder")
    assert run.counts == {"passed": 3, "error": 1}
    assert run.status == 1
    run.line("^ERROR test_a.py::test_isolated - ValueError: at its end")
    (report,) = (r for r in run.record["reports"] if r["nodeid"].endswith("isolated") and r["when"] == "teardown")
    assert ["kept", 1] in report["user_properties"]


BOTH = """
import pytest

@pytest.fixture(scope="module", autouse=True)
def broken():
    yield
    raise ValueError("at its end")

def test_here(): pass

@pytest.mark.vllm_isolated
def test_isolated(): pass
"""


def test_where_the_same_fixture_fails_in_both_processes_one_error_is_reported(folder):
    run = folder({"test_a.py": BOTH}).run("-ra")
    assert run.counts == {"passed": 2, "error": 1}
    run.line("^ERROR test_a.py::test_isolated - ")
    assert "ValueError: at its end" in run.output
