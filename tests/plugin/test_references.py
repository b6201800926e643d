from __future__ import annotations

import importlib
import re
import sys
import weakref
from xml.etree import ElementTree

import pytest

from pytest_vllm_cleanup.checks import references

pytestmark = pytest.mark.usefixtures("hasty")
GROUPS = importlib.import_module("builtins" if sys.version_info >= (3, 11) else "exceptiongroup")

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
    # Nor does pytest print the same for pytest's own loop over its plugins, which has one more then.
    return re.sub("0x[0-9a-f]{6,}", "0x", re.sub("^ *methods += .*$", "", text, flags=re.M))


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


@pytest.mark.parametrize("style", ["--tb=long", "--showlocals"])
@pytest.mark.parametrize("asks", ["tensor", "request"])
def test_a_fixture_of_wider_scope_that_failed_is_reported_by_each_test_and_keeps_its_memory_till_it_ends(
    run, style, asks
):
    source = """
pytestmark = pytest.mark.gpu_released
def connect(host, port):
    tensor = Tensor()
    raise ValueError("own")
@pytest.fixture(scope="module")
def tensor():
    return connect("localhost", 8000)
def test_first(ASKS):
    request.getfixturevalue("tensor")
def test_second(ASKS):
    request.getfixturevalue("tensor")
def test_other():
    assert gpu.allocated == 2 * MIB, "pytest keeps what it raised"
""".replace("ASKS", asks)
    modules = {"test_a": source, "test_b": "def test_it():\n    assert gpu.allocated == 0"}
    ours, plain = run(modules, style), run(modules, style, *WITHOUT)
    failed = {"errors": 2} if asks == "tensor" else {"failed": 2}
    assert ours.parseoutcomes() == {"passed": 2, **failed}
    # Without the plugin that of the other module fails: sys.last_value keeps the exception on.
    assert sections(plain).startswith(sections(ours))
    assert sections(ours).count("host = 'localhost'") >= 2


LOOKING = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        print()
        for name, value in {**vars(item.instance), **item.funcargs}.items():
            print("SEEN", name, value)
        driver = item.funcargs["driver"]
        driver.note = driver.log.getvalue()
    return report
"""
LOOKED_AT = """
import io
class Value:
    def __init__(self):
        self.log = io.StringIO()
    def __repr__(self):
        return "Value"
kept, shared = [], Value()
@pytest.fixture
def driver():
    return Value()
@pytest.fixture
def wide():
    return shared
@pytest.fixture
def names():
    return {"a": ["b", 1, None]}
@pytest.fixture
def tensors():
    return [Tensor()]
class TestIt:
    @pytest.mark.gpu_released
    def test_it(self, driver, wide, names, tensors):
        self.text, self.own, self.wide = "text", Value(), shared
        PROBLEM
def test_next():
    assert gpu.allocated == len(kept) * 2 * MIB
"""


@pytest.mark.parametrize(
    ("problem", "outcomes"),
    [
        ("kept.append(Tensor())", {"passed": 2, "leaked": 1}),
        ("tensor = Tensor(); raise ValueError", {"passed": 1, "failed": 1}),
    ],
    ids=["leaks", "fails"],
)
def test_hooks_that_look_later_find_what_is_alive_and_a_word_on_what_is_gone(run, problem, outcomes):
    result = run(LOOKED_AT.replace("PROBLEM", problem), "-s", conftest=LOOKING)
    assert result.parseoutcomes() == outcomes
    seen = dict(line.split(" ", 2)[1:] for line in result.outlines if line.startswith("SEEN"))
    assert {name: seen.pop(name) for name in ("wide", "names", "text")} == {
        "wide": "Value",
        "names": "{'a': ['b', 1, None]}",
        "text": "text",
    }
    why = "is gone: only pytest still held it when test_inner.py::TestIt::test_it was checked for leaks"
    assert seen == {name: f"<{name} {why}>" for name in ("driver", "tensors", "own")}


FIRST = """
import pytest
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        print("\\nSEEN", type(item.funcargs["tensor"]).__name__)
    return report
"""


def test_hooks_that_look_at_the_report_of_a_failed_teardown_find_all(run):
    result = run(
        """
@pytest.fixture
def tensor():
    yield Tensor()
    raise ValueError("own")
@pytest.mark.gpu_released
def test_it(tensor):
    pass
""",
        "-s",
        conftest=FIRST,
    )
    assert result.parseoutcomes() == {"passed": 1, "errors": 1}
    assert "SEEN Tensor" in result.outlines


class Value:
    pass


class Slotted:
    __slots__ = ()


def test_no_memory_is_kept_meanwhile_and_none_comes_back(tmp_path):
    shared, own = Value(), Value()
    reference = weakref.ref(own)
    untouched = {"path": tmp_path, "none": None, "names": [("a", 1), {2.0}], "reference": reference}
    values = {**untouched, "shared": shared, "own": own, "list": [own], "slotted": Slotted(), "text": "x" * 10**6}
    released = references.Released()
    released.let_go(values, "test_x")
    del own
    assert reference() is None
    assert {name for name, value in values.items() if type(value) is references.Gone} == {
        *("shared", "own", "list", "slotted", "text")
    }
    released.restore()
    assert values["shared"] is shared
    assert repr(values["own"]) == "<own is gone: only pytest still held it when test_x was checked for leaks>"
    assert all(values[name] is value for name, value in untouched.items())
    reference = weakref.ref(shared)
    del shared, values["shared"]
    assert reference() is None


def test_what_a_hook_has_put_in_the_place_of_a_value_stays():
    shared = Value()
    values, released = {"shared": shared}, references.Released()
    released.let_go(values, "test_x")
    values["shared"] = "of the hook"
    released.restore()
    assert values == {"shared": "of the hook"}


GENERATORS = {
    "generator": """
def recorder():
    while True:
        try:
            yield seen
        except ValueError as error:
            seen.append(str(error))
steps = recorder()
""",
    "coroutine": """
class Pause:
    def __await__(self):
        yield seen
async def recorder():
    while True:
        try:
            await Pause()
        except ValueError as error:
            seen.append(str(error))
steps = recorder()
""",
    "async_generator": """
async def recorder():
    while True:
        try:
            yield seen
        except ValueError as error:
            seen.append(str(error))
class Steps:
    generator = recorder()
    def send(self, value):
        try:
            self.generator.asend(value).send(None)
        except StopIteration as stop:
            return stop.value
    def throw(self, error):
        try:
            self.generator.athrow(error).send(None)
        except StopIteration as stop:
            return stop.value
steps = Steps()
""",
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_what_has_caught_an_error_and_waits_at_the_same_place_goes_on(run, kind):
    source = """
pytestmark = pytest.mark.gpu_released
seen = []
RECORDER
def test_fails():
    tensor = Tensor()
    steps.send(None)
    try:
        raise ValueError("own")
    except ValueError as error:
        steps.throw(error)
        raise
def test_next():
    assert gpu.allocated == 0
    assert steps.send(None) == ["own"]
""".replace("RECORDER", GENERATORS[kind])
    assert run(source).parseoutcomes() == {"failed": 1, "passed": 1}


ODD_ERRORS = """
import pytest
class Nothing(Exception):
    exceptions = None
class Texts(Exception):
    exceptions = ["timeout", "refused"]
class Raising(Exception):
    @property
    def exceptions(self):
        raise RuntimeError("of the user's own")
"""


def test_attributes_of_a_users_exception_are_not_taken_for_those_of_a_group(run):
    source = (
        ODD_ERRORS
        + """
pytestmark = pytest.mark.gpu_released
kept = []
@pytest.mark.parametrize("kind", [Nothing, Texts, Raising])
def test_leaks(kind):
    kept.append(Tensor())
    raise kind
@pytest.mark.parametrize("kind", [Nothing, Texts, Raising])
def test_fails(kind):
    tensor = Tensor()
    raise kind
"""
    )
    result = run(source, "--tb=native")
    assert result.parseoutcomes() == {"failed": 6, "leaked": 3}
    result.stdout.no_fnmatch_line("*went wrong in pytest-vllm-cleanup*")


def test_causes_and_members_are_not_what_a_users_class_calls_so():
    class Odd(GROUPS.BaseExceptionGroup):
        @property
        def odd(self):
            raise RuntimeError("of the user's own")

        exceptions = __cause__ = __context__ = __traceback__ = odd

    members = [ValueError("first"), KeyError("second")]
    odd = Odd("own", members)
    assert list(references.chain(odd)) == [odd, *reversed(members)]
    assert references.traceback_of(odd) is None


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


def test_an_instance_that_somebody_else_holds_keeps_its_tensor_and_is_a_leak(run):
    result = run("""
handlers = []
class TestIt:
    @pytest.mark.gpu_released
    def test_registers(self):
        self.tensor = Tensor(10 * MIB)
        handlers.append(self.handle)
    def handle(self):
        return self.tensor
def test_after():
    assert handlers[0]().__class__ is Tensor
""")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}
    assert any("left 10 MiB" in line for line in result.outlines)
