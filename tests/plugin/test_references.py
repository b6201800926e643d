from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

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
HOLDERS |= {
    "fixture_elsewhere": """
def test_it(broken_fixture):
    pass
def test_teardown(broken_teardown):
    pass
def test_asks(request):
    request.getfixturevalue("broken_fixture")
""",
    "strict_xfail": """
@pytest.mark.xfail(strict=True)
def test_it():
    tensor = Tensor()
    raise ValueError("own")
""",
    "strict_xfail_that_passes": """
@pytest.mark.xfail(strict=True, reason="own")
def test_it():
    tensor = Tensor()
""",
    "xfail_of_another_kind": """
@pytest.mark.xfail(raises=KeyError)
def test_it():
    tensor = Tensor()
    raise ValueError("own")
""",
    "skip": """
def test_it():
    tensor = Tensor()
    pytest.skip("own")
""",
    "indirect_parameter": """
@pytest.fixture
def tensor(request):
    return Tensor(request.param * MIB)
@pytest.mark.parametrize("tensor", [2, 3], indirect=True)
def test_it(tensor):
    raise ValueError("own")
""",
    "fixture_after_another": """
@pytest.fixture
def tensor():
    yield Tensor()
@pytest.fixture
def broken(tensor):
    assert tensor is None, "own"
def test_it(broken):
    pass
""",
    "setup_and_teardown": """
@pytest.fixture
def tensor():
    tensor = Tensor()
    yield tensor
    raise ValueError("own")
def test_it(tensor):
    raise ValueError("own")
""",
    "two_teardowns": """
@pytest.fixture
def tensor():
    tensor = Tensor()
    yield tensor
    raise ValueError("own")
@pytest.fixture
def other(tensor):
    yield tensor
    raise KeyError("own")
def test_it(other):
    pass
""",
    "setup_method": """
class TestIt:
    def setup_method(self):
        self.tensor = Tensor()
        raise ValueError("own")
    def test_it(self):
        pass
""",
    "teardown_method": """
class TestIt:
    def teardown_method(self):
        raise ValueError("own")
    def test_it(self):
        self.tensor = Tensor()
""",
    "class_fixture_of_an_instance": """
class TestIt:
    @pytest.fixture(autouse=True)
    def tensor(self):
        self.tensor = Tensor()
    def test_it(self):
        raise ValueError("own")
""",
    "raises": """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    with pytest.raises(KeyError) as caught:
        inner()
    assert caught is None, "own"
""",
    "coroutine": """
import asyncio
async def inner():
    tensor = Tensor()
    await asyncio.sleep(0)
    raise ValueError("own")
def test_it():
    asyncio.run(inner())
""",
    "generator": """
def inner():
    tensor = Tensor()
    yield 1
    raise ValueError("own")
def test_it():
    steps = inner()
    next(steps)
    next(steps)
""",
    "exit_of_a_context": """
import contextlib
@contextlib.contextmanager
def inner():
    tensor = Tensor()
    yield tensor
def test_it():
    with inner() as tensor:
        raise ValueError("own")
""",
    "unittest_set_up": """
import unittest
class TestIt(unittest.TestCase):
    def setUp(self):
        self.tensor = tensor = Tensor()
        raise ValueError("own")
    def test_it(self):
        pass
""",
    "unittest_tear_down": """
import unittest
class TestIt(unittest.TestCase):
    def tearDown(self):
        raise ValueError("own")
    def test_it(self):
        self.tensor = tensor = Tensor()
""",
    "unittest_set_up_and_test": """
import unittest
class TestIt(unittest.TestCase):
    def setUp(self):
        for _ in range(2):  # pytest tells of the first one that fails
            self.addCleanup(self.clean, Tensor())
    def clean(self, tensor):
        raise KeyError("own")
    def test_it(self):
        tensor = Tensor()
        self.fail("own")
""",
    "unittest_set_up_class": """
import unittest
class TestIt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        tensor = Tensor()
        raise ValueError("own")
    def test_it(self):
        pass
""",
    "unittest_sub_test": """
import unittest
class TestIt(unittest.TestCase):
    def test_it(self):
        for number in range(3):
            with self.subTest(number=number):
                self.tensor = tensor = Tensor()
                assert number == 1, "own"
""",
    "unittest_async": """
import unittest
class TestIt(unittest.IsolatedAsyncioTestCase):
    async def test_it(self):
        self.tensor = tensor = Tensor()
        raise ValueError("own")
""",
    "unittest_expected": """
import unittest
class TestIt(unittest.TestCase):
    @unittest.expectedFailure
    def test_it(self):
        self.tensor = tensor = Tensor()
        raise ValueError("own")
""",
    "unittest_assert_raises": """
import unittest
def inner():
    tensor = Tensor()
    raise KeyError("inner")
class TestIt(unittest.TestCase):
    def test_it(self):
        with self.assertRaises(KeyError) as caught:
            inner()
        self.assertIsNone(caught, "own")
""",
}
if hasattr(pytest, "Subtests"):  # from pytest 9
    HOLDERS["sub_test"] = """
def test_it(subtests):
    for number in range(3):
        with subtests.test(number=number):
            tensor = Tensor()
            assert number == 1, "own"
"""
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
    HOLDERS["group_in_a_group"] = """
def inner():
    tensor = Tensor()
    raise KeyError("inner")
def test_it():
    try:
        inner()
    except KeyError as error:
        kept = error
    try:
        raise ExceptionGroup("inner", [kept, ValueError("beside")])
    except* ValueError as group:
        raise ExceptionGroup("own", [TypeError("first"), group])
"""
    HOLDERS["task_group"] = """
import asyncio
async def work():
    tensor = Tensor()
    await asyncio.sleep(0)
    raise ValueError("own")
async def both():
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(work())
def test_it():
    asyncio.run(both())
"""


def without_addresses(text):
    # Nor does --showlocals print the same for pytest's own loop over its plugins, which has one more then.
    return re.sub("0x[0-9a-f]{6,}", "0x", re.sub("^ +methods += .*$", "", text, flags=re.M))


def sections(result):
    """What pytest says of failures and errors, but for addresses of objects, which differ from run to run."""
    found = re.findall(r"^=+ (?:FAILURES|ERRORS) =+$.*?(?=^=|^- generated xml)", result.stdout.str(), re.M | re.S)
    return without_addresses("".join(found))


def in_junit(path):
    """What JUnit's file says of each problem."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return [
        (
            case.get("classname"),
            case.get("name"),
            child.tag,
            *map(without_addresses, (child.get("message"), child.text)),
        )
        for case in cases
        for child in case
        if child.text and child.tag != "properties"
    ]


# Its file is not that of the test, so pytest does not cut its traceback to that.
BROKEN_FIXTURE = """
import pytest
from fake_gpu import Tensor
@pytest.fixture
def broken_fixture():
    tensor = Tensor()
    raise ValueError("own")
@pytest.fixture
def broken_teardown():
    tensor = Tensor()
    yield
    raise ValueError("own")
"""
WITHOUT = ("-p", "no:vllm_cleanup", "-Wignore::pytest.PytestUnknownMarkWarning")


@pytest.mark.parametrize("style", ["--showlocals", "--tb=short", "-vv", "--tb=native"])
def test_what_only_a_failed_test_holds_is_no_leak_and_is_printed_as_without_the_plugin(run, pytester, style):
    start = "import gc\ngc.disable()\npytestmark = pytest.mark.gpu_released\n"
    modules = {f"test_{name}": start + source for name, source in HOLDERS.items()}
    ours = run(modules, style, "--junitxml=ours.xml", conftest=BROKEN_FIXTURE)
    plain = run(modules, style, "--junitxml=plain.xml", *WITHOUT, conftest=BROKEN_FIXTURE)
    leaks = [line.split(" left ")[0] for line in ours.outlines if " left " in line]
    assert leaks == []
    assert ours.parseoutcomes() == plain.parseoutcomes()
    assert sections(ours) == sections(plain)
    if style != "--tb=native":
        assert len(re.findall("^E  .*own", sections(ours), re.M)) >= len(HOLDERS) - 5
    assert in_junit(pytester.path / "ours.xml") == in_junit(pytester.path / "plain.xml")


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
        if traceback is None:  # before the first line, for --trace
            return self.set_continue()
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


def test_a_failing_fixture_of_wider_scope_harms_none_of_the_tests_that_ask_for_it(run):
    source = """
pytestmark = pytest.mark.gpu_released
@pytest.fixture(scope="module")
def tensor():
    tensor = Tensor()
    raise ValueError("own")
def test_first(tensor):
    pass
def test_second(tensor):
    pass
def test_other():
    assert gpu.allocated == 0
"""
    ours, plain = run(source), run(source, *WITHOUT)
    assert ours.parseoutcomes() == {"passed": 1, "errors": 2}
    # Without the plugin the third one fails: pytest keeps the fixture's exception, and that keeps the tensor.
    assert plain.parseoutcomes() == {"failed": 1, "errors": 2}
    assert sections(plain).startswith(sections(ours))


@pytest.mark.parametrize("option", ["--pdb", "--trace"])
def test_what_a_debugger_may_look_at_is_left_alone(run, pytester, option):
    pytester.makepyfile(silent=SILENT_DEBUGGER)
    source = """
@pytest.fixture
def tensor():
    return Tensor()
class TestIt:
    @pytest.mark.gpu_released
    def test_it(self, tensor):
        self.tensor = tensor
        raise ValueError("own")
"""
    look = """
def pytest_runtest_logreport(report):
    if report.when == "teardown":
        print("\\nKEPT", "tensor" in ITEM[0].funcargs, hasattr(ITEM[0].instance, "tensor"))
ITEM = []
def pytest_itemcollected(item):
    ITEM.append(item)
"""
    result = run(source, option, "--pdbcls=silent:Silent", "-s", conftest=LAST + look)
    assert "KEPT True True" in result.outlines
    assert last(result) == "LAST ValueError True"
    assert result.parseoutcomes()["failed"] == 1
