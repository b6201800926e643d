"""Tests with every outcome, run once in one process and once each in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import unittest
import warnings

import pytest
from helpers import Odd, Unpicklable, assert_even, chained, group


@pytest.fixture(autouse=True)
def noise(request):
    print("set up")
    print("set up", file=sys.stderr)
    logging.getLogger("inner").warning("set up %s", request.node.name)
    yield
    print("torn down")
    print("torn down", file=sys.stderr)
    logging.getLogger("inner").warning("torn down")


@pytest.fixture
def bad_setup():
    local = "seen with --showlocals"
    raise ValueError("setup " + local[:4])


@pytest.fixture
def bad_teardown():
    yield
    raise OSError(5, "teardown")


@pytest.fixture
def skips():
    pytest.skip("in a fixture")


@pytest.fixture
def skips_at_end():
    yield
    pytest.skip("at the end")


def test_passes(tmp_path, record_property):
    print("called")
    os.write(2, b"past sys.stderr\n")
    logging.getLogger("inner").error("called")
    record_property("number", 3)
    record_property("list", [1, "two"])
    (tmp_path / "file").write_text("text")


def test_fails():
    numbers, odd = [1, 2], Odd()
    print("before the end")
    assert numbers == [1, 3], odd


def test_fails_in_a_helper():
    assert_even(3)


def test_fails_with_a_chain():
    chained()


def test_fails_with_a_group():
    group()


def test_fails_without_a_traceback():
    pytest.fail("why", pytrace=False)


def test_raises_what_does_not_pickle():
    raise Unpicklable(lambda: None)


def test_error_in_setup(bad_setup):
    pass


def test_error_in_teardown(bad_teardown):
    print("called")


def test_fails_and_error_in_teardown(bad_teardown):
    raise AssertionError("both")


def test_skips():
    pytest.skip("in the call")


@pytest.mark.skip(reason="by marker")
def test_skipped():
    pass


@pytest.mark.skipif(sys.version_info > (3,), reason="by condition")
def test_skipped_if():
    pass


def test_skips_in_setup(skips):
    pass


def test_skips_in_teardown(skips_at_end):
    pass


@pytest.mark.xfail(reason="known")
def test_xfails():
    raise AssertionError("known")


@pytest.mark.xfail(reason="known", strict=True)
def test_xfails_strictly():
    raise AssertionError("known")


@pytest.mark.xfail(reason="known")
def test_xpasses():
    pass


@pytest.mark.xfail(reason="known", strict=True)
def test_xpasses_strictly():
    pass


@pytest.mark.xfail(reason="known")
def test_xfails_in_setup(bad_setup):
    pass


@pytest.mark.xfail(reason="not this", raises=KeyError)
def test_xfail_with_another_exception():
    raise AssertionError("another")


@pytest.mark.xfail(reason="not run", run=False)
def test_xfail_not_run():
    os._exit(3)


def test_xfails_by_call():
    pytest.xfail("in the call")


def test_warns():
    warnings.warn("watch", UserWarning, stacklevel=1)
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    warnings.warn(UnicodeWarning("other", 3), stacklevel=1)


@pytest.mark.filterwarnings("error")
def test_warning_is_an_error():
    warnings.warn("watch", UserWarning, stacklevel=1)


@pytest.mark.parametrize("value", ["a::b", "[x/ \n]", "", "é中\udcff", "-k", None, Odd(), 1.5, "x" * 300])
def test_parameters(value):
    print(ascii(value))
    assert value


@pytest.mark.parametrize("number", [1, 2], indirect=True)
@pytest.mark.parametrize("letter", [pytest.param("a", marks=pytest.mark.xfail), pytest.param("b", id="bé")])
def test_two_parameters(number, letter):
    assert number > 1


@pytest.fixture
def number(request):
    return request.param


class TestClass:
    value = 0

    @classmethod
    def setup_class(cls):
        print("class up")

    def setup_method(self):
        print("method up")

    def teardown_method(self):
        print("method down")

    def test_method(self, record_property):
        record_property("method", True)
        assert self.value == 0


class TestOuter:
    class TestInner:
        def test_deep(self):
            raise AssertionError("deep")


class TestUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print("setUpClass")
        cls.ready = True

    def setUp(self):
        print("setUp")

    def tearDown(self):
        print("tearDown")

    def test_passes(self):
        self.assertTrue(self.ready)  # noqa: PT009

    def test_fails(self):
        self.assertEqual(1, 2, "numbers")  # noqa: PT009

    def test_skips(self):
        self.skipTest("in unittest")

    @unittest.skip("decorated")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected_failure(self):
        raise AssertionError("expected")

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass

    def test_subtests(self):
        for number in range(3):
            with self.subTest("part", number=number):
                print("part", number)
                assert number != 1


class TestBrokenUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("no class")

    def test_never(self):
        pass


def test_subtests(subtests):
    for number in range(3):
        with subtests.test("part", number=number):
            print("part", number)
            if number == 2:
                pytest.skip("the last")
            assert number != 1


async def test_async():
    await asyncio.sleep(0)


def test_with_an_example():
    """Add.

    >>> doctest = True
    >>> doctest
    False
    """


def test_captures(capsys, caplog):
    print("captured")
    logging.getLogger("inner").critical("caught")
    assert capsys.readouterr().out == "captured\n"
    assert "caught" in caplog.text
    print("and left")


def test_control_characters():
    print("bell \a escape \x1b[31m nul \0 lone \udcff".encode("utf-8", "replace").decode())
    raise AssertionError("\x1b[31mred\x1b[0m \0 é")


def teardown_module():
    print("module down")


def setup_module():
    print("module up")


def test_writes_into_the_junit_report(record_xml_attribute):
    record_xml_attribute("assertions", "REQ-1234")
