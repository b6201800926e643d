"""What pytest keeps is named in the words of its users."""

from __future__ import annotations

import re

import pytest

OPTIONS = ("-s", "-p", "no:cacheprovider", "-p", "no:vllm_cleanup", "-p", "no:rerunfailures")
CONFTEST = """
    import time
    import weakref
    import pytest
    from pytest_vllm_cleanup.diagnosis.chains import find_chains

    class Held:
        def __init__(self):
            Held.last = weakref.ref(self)

    pytest.Held = Held

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(nodeid):
        chains = find_chains([pytest.Held.last()], deadline=time.monotonic() + 60)
        print("CHAINS", *chains, sep="|")
"""


def chains(pytester: pytest.Pytester, module: str) -> list[str]:
    """Run a module of tests and return the chains to the last ``Held`` after the first test."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_x=module)
    result = pytester.runpytest_subprocess(*OPTIONS)
    line = next(line for line in result.outlines if "CHAINS" in line)
    return [re.sub(r"(?<=\.py:)\d+", "LINE", chain) for chain in line.partition("CHAINS|")[2].split("|")]


def test_a_session_fixture(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        @pytest.fixture(scope="session")
        def llm():
            return {"a": [pytest.Held()]}

        def test_it(llm):
            pass

        def test_next():
            pass
        """,
    )
    assert found[0] == "session-scoped fixture llm['a'][0] (test_x.py:LINE) -> Held"


def test_what_the_generator_of_a_fixture_keeps(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        @pytest.fixture(scope="module")
        def llm():
            helper = pytest.Held()
            yield 1
            del helper

        def test_it(llm):
            pass

        def test_next():
            pass
        """,
    )
    assert found[0] == (
        "module-scoped fixture 'llm' (test_x.py:LINE) -> "
        "local 'helper' of suspended generator llm (test_x.py:LINE) -> Held"
    )


def test_what_a_fixture_wants_to_be_called_at_its_end(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        @pytest.fixture(scope="module")
        def llm(request):
            helper = pytest.Held()
            request.addfinalizer(lambda: helper)

        def test_it(llm):
            pass

        def test_next():
            pass
        """,
    )
    assert found[0] == (
        "module-scoped fixture 'llm' (test_x.py:LINE) -> closure variable 'helper' of llm.<locals>.<lambda> -> Held"
    )


def test_the_failure_of_a_fixture(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        @pytest.fixture(scope="module")
        def llm():
            held = pytest.Held()
            raise ValueError

        def test_it(llm):
            pass

        def test_next():
            pass
        """,
    )
    assert found[0] == (
        "failure of module-scoped fixture 'llm' (test_x.py:LINE) -> local 'held' of frame llm (test_x.py:LINE) -> Held"
    )


def test_the_instance_of_a_test_class(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        class TestEngine:
            def test_it(self):
                self.llms = [pytest.Held()]
        """,
    )
    assert found[0] == "attribute llms[0] of the instance of test class TestEngine -> Held"


def test_a_parameter(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        def pytest_generate_tests(metafunc):
            metafunc.parametrize("llm", [[pytest.Held()]], ids=["a"])

        def test_it(llm):
            pass
        """,
    )
    assert found[0] == "parameter llm[0] of test 'test_it[a]' -> Held"


def test_an_attribute_of_a_test(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        def test_it(request):
            request.node.llm = pytest.Held()
        """,
    )
    assert found[0] == "test 'test_it': Function.llm -> Held"


def test_an_attribute_of_the_configuration(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        def test_it(request):
            request.config.llm = pytest.Held()
        """,
    )
    assert found[0] == "pytest's Config.llm -> Held"


def test_a_class_attribute_of_a_unittest_class(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import unittest
        import pytest

        class TestEngine(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.llm = pytest.Held()

            def test_it(self):
                pass
        """,
    )
    assert found[0] == "test_x.py: class attribute TestEngine.llm -> Held"


def test_the_failure_of_a_test(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        def test_it():
            llm = pytest.Held()
            assert not llm
        """,
    )
    # Other names there for the same are not said again.
    assert [chain for chain in found if chain.startswith("sys.")] == [
        "sys.last_traceback -> local 'llm' of frame test_it (test_x.py:LINE) -> Held"
    ]


def test_a_default_argument_of_a_test_function(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        @pytest.mark.parametrize("number", range(20))
        def test_it(number, cache=[]):
            cache.append(pytest.Held())
        """,
    )
    assert found == ["test_x.py: default argument cache[0] of test_it -> Held"]


def test_a_default_argument_of_a_test_function_that_only_pytest_knows(pytester: pytest.Pytester) -> None:
    found = chains(
        pytester,
        """
        import pytest

        def test_it(cache=[]):
            cache.append(pytest.Held())
            globals().pop("test_it")
        """,
    )
    assert found == ["test_x.py: default argument cache[0] of test_it -> Held"]
