from __future__ import annotations

import pytest

from pytest_vllm_cleanup import config

pytestmark = pytest.mark.usefixtures("hasty")

# What an engine asks for stands in its configuration; none is built here.
ENGINE = """
from types import SimpleNamespace
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup import DeviceQuarantinedError
def engine(share=0.9, devices=1, **parallel):
    backend = "uni" if devices == 1 else "mp"
    known = dict(worker_cls="vllm.v1.worker.gpu_worker.Worker", distributed_executor_backend=backend,
                 data_parallel_size=1, world_size=devices)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**known, **parallel}),
        cache_config=SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=None),
        load_config=SimpleNamespace(load_format="auto"),
    )
    handle = registry.begin("LLMEngine")
    try:
        registry.ask_gates(handle, config)
    finally:
        registry._handles.remove(handle)
GIB = 1024 * MIB
@pytest.mark.gpu_released
def test_leak():
    gpu.allocated += 13 * GIB
"""
HOOK = """
def pytest_vllm_cleanup_leaked(item, leak):
    print(f"hook: {item.name} {leak.owner} {leak.nodeid} {leak.device} {leak.bytes} {leak.reason!r} {leak.holder!r}")
"""
REFUSED = (
    "E * pytest_vllm_cleanup.engines.errors.DeviceQuarantinedError: cuda:0 has 66.4 GiB of 80 GiB free, and this "
    "engine asks for 72 GiB (gpu_memory_utilization 0.9). In its way: test test_inner.py::test_leak left 13 GiB on *"
)


def test_an_engine_that_cannot_start_because_of_a_leak_is_refused(run):
    result = run(ENGINE + "def test_next():\n    engine()\n")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1, "failed": 1}
    result.stdout.fnmatch_lines([REFUSED])
    assert "still there" not in result.stdout.str()  # the error has said so


def test_an_engine_that_fits_beside_the_leak_is_let_through(run):
    result = run(ENGINE + "def test_next():\n    engine(0.8)\n")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


def test_with_on_leak_fail_nothing_is_refused(run):
    result = run(ENGINE + "def test_next():\n    engine()\n", "--vllm-cleanup-on-leak=fail")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


@pytest.mark.parametrize("arguments", ["0.9", "0.5, devices=2"])
def test_every_device_of_the_engine_counts(run, arguments):
    source = ENGINE.replace("gpu.allocated +=", "second_gpu.allocated += 50 * GIB; gpu.allocated +=")
    result = run(f"{source}def test_next():\n    engine({arguments})\n")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1, "failed": 1}


def test_a_full_device_that_the_engine_does_not_use_is_not_in_its_way(run):
    source = ENGINE.replace("gpu.allocated +=", "second_gpu.allocated +=")
    result = run(source + "def test_next():\n    engine()\n")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


@pytest.mark.parametrize(
    "parallel",
    [
        "worker_cls='vllm.v1.worker.cpu_worker.CPUWorker'",
        "worker_cls='mine.Worker'",
        "distributed_executor_backend='ray'",
        "distributed_executor_backend='external_launcher'",
        "distributed_executor_backend=type('Mine', (), {})",
        "data_parallel_size=2",
        "nnodes=2",
        "assigned_physical_gpu_ids=[1]",
    ],
)
def test_nothing_is_refused_where_the_need_cannot_be_known(run, parallel):
    result = run(f"{ENGINE}def test_next():\n    engine({parallel})\n")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


@pytest.mark.parametrize("when", ["between", "within"])
def test_it_lifts_itself_when_the_memory_comes_back(run, when):
    back = "gpu.allocated -= 13 * GIB\n"
    between = f"def test_back():\n    {back}" if when == "between" else ""
    within = f"    {back}" if when == "within" else ""
    result = run(f"{ENGINE}{between}def test_next():\n{within}    gpu.others += 9 * GIB\n    engine()\n")
    assert result.parseoutcomes() == {"passed": 3 if when == "between" else 2, "leaked": 1}


def test_memory_that_another_test_takes_after_a_leak_came_back_is_not_blamed_on_it(run):
    result = run(f"""{ENGINE}
@pytest.mark.gpu_released
def test_back():
    gpu.allocated -= 13 * GIB
@pytest.mark.gpu_released
def test_clean():
    pass
def test_next():
    tensor = Tensor(13 * GIB)
    engine()
""")
    assert result.parseoutcomes() == {"passed": 4, "leaked": 1}


def test_caches_are_flushed_before_an_engine_is_refused(run):
    result = run(f"""{ENGINE}
def test_next(monkeypatch):
    from pytest_vllm_cleanup.checks import gate
    monkeypatch.setattr(gate, "flush_caches", lambda: setattr(gpu, "cached", 0))
    gpu.cached += 3 * GIB
    engine(0.8)
""")
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1}


def test_a_leak_of_an_unchecked_test_is_nobodys(run):
    result = run(ENGINE.replace("@pytest.mark.gpu_released\n", "") + "def test_next():\n    engine()\n")
    assert result.parseoutcomes() == {"passed": 2}


def test_a_run_inside_the_run_does_not_know_the_leaks_of_the_other(run):
    result = run(
        f"""{ENGINE}
def test_inside(pytester):
    pytester.makepyfile("import pytest\\n@pytest.mark.gpu_released\\ndef test_it():\\n    pass\\n")
    assert pytester.runpytest_inprocess("-p", "vllm_cleanup").ret == 0
    assert len(registry.gates) == 1
def test_next():
    engine()
""",
        "-p",
        "pytester",
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1, "failed": 1}
    result.stdout.fnmatch_lines([REFUSED])


def test_exit_ends_the_run_at_the_first_leak_that_stays(run):
    result = run(ENGINE + "def test_next():\n    pass\n", "--vllm-cleanup-on-leak=exit")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    result.stdout.fnmatch_lines(
        ["*! test test_inner.py::test_leak left 13 GiB on cuda:0*(--vllm-cleanup-on-leak=exit) !*"]
    )


def test_exit_goes_on_after_what_came_back(run):
    source = "@pytest.mark.gpu_released\ndef test_clean():\n    pass\n" * 2
    result = run(source.replace("test_clean", "test_first", 1), "--vllm-cleanup-on-leak=exit")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 2}


def test_exit_ends_a_distributed_run_with_the_reports_of_its_leaks(run):
    pytest.importorskip("xdist")
    source = ENGINE + "@pytest.mark.parametrize('n', range(50))\ndef test_next(n):\n    pass\n"
    result = run(source, "--vllm-cleanup-on-leak=exit", "-p", "xdist", "-n", "1")
    assert result.ret != 0
    assert result.parseoutcomes()["leaked"] == 1
    assert result.parseoutcomes()["passed"] < 51


def test_the_hook_is_called_once_for_each_leak_that_stays(run):
    result = run(
        f"""{ENGINE}
@pytest.mark.gpu_released
def test_both():
    gpu.allocated += 2 * GIB
    second_gpu.allocated += 3 * GIB
@pytest.mark.gpu_released
def test_clean():
    pass
""",
        "-s",
        conftest=HOOK,
    )
    lines = [line for line in result.outlines if "hook: " in line]
    assert [line[line.index("hook: ") :] for line in lines] == [
        f"hook: {name} test test_inner.py::{name} test_inner.py::{name} {rest} ''"
        for name, rest in [
            ("test_leak", f"cuda:0 {13 << 30} 'allocator'"),
            ("test_both", f"cuda:0 {2 << 30} 'allocator'"),
            ("test_both", f"cuda:1 {3 << 30} 'allocator'"),
        ]
    ]


@pytest.mark.parametrize("call", ["pytest.fail('by the hook')", "pytest.skip('by the hook')", "[][0]"])
@pytest.mark.parametrize("failing", ["", "    yield\n    raise ValueError('own')"])
def test_a_hook_that_fails_is_a_warning(run, call, failing):
    conftest = f"import pytest\ndef pytest_vllm_cleanup_leaked(leak):\n    {call}\n"
    fixture = f"@pytest.fixture(autouse=True)\ndef own(request):\n{failing or '    pass'}\n"
    result = run(ENGINE + fixture, conftest=conftest)
    assert result.ret == 1
    found = result.parseoutcomes()
    assert found == {"passed": 1, "errors" if failing else "leaked": 1, "warnings": 1}
    result.stdout.fnmatch_lines(["*a hook pytest_vllm_cleanup_leaked went wrong*"])


def test_a_hook_may_end_the_run(run):
    conftest = "import pytest\ndef pytest_vllm_cleanup_leaked(leak):\n    pytest.exit('by the hook', returncode=3)\n"
    result = run(ENGINE + "def test_next():\n    pass\n", conftest=conftest)
    assert result.ret == 3
    assert "by the hook" in result.stdout.str() + result.stderr.str()


def test_without_the_plugin_an_optional_hook_does_no_harm(pytester):
    pytester.makeconftest(f"import pytest\n@pytest.hookimpl(optionalhook=True)\n{HOOK.strip()}\n")
    pytester.makepyfile("def test_it():\n    pass\n")
    assert pytester.runpytest_subprocess("-p", "no:vllm_cleanup").ret == 0


@pytest.mark.parametrize("phase", ["call", "setup"])
@pytest.mark.parametrize("error", ["OutOfMemoryError", "ModelDoesNotFitError"])
def test_a_test_that_runs_out_of_memory_has_the_leaks_in_its_section(run, error, phase):
    fixture = "@pytest.fixture\ndef full():\n    raise full_error()\n" if phase == "setup" else ""
    body = "pass" if phase == "setup" else "raise ValueError from full_error()"
    result = run(f"""{ENGINE}
class {error}(RuntimeError): pass
class full_error({error}): pass
{fixture}
def test_next({"full" if phase == "setup" else ""}):
    {body}
""")
    text = result.stdout.str()
    section = text[text.index("test_next _") : text.index("= LEAKS =")]
    assert "- GPU memory -" in section
    assert "still there from an earlier leak: test test_inner.py::test_leak left 13 GiB on cuda:0" in section


def test_other_failures_have_no_such_section(run):
    result = run(ENGINE + "def test_next():\n    assert 0, 'own'\n")
    text = result.stdout.str()
    assert "own" in text
    assert "still there" not in text


def test_a_bug_in_the_gate_lets_the_engine_through(run):
    result = run(
        ENGINE + "def test_next():\n    engine()\n",
        conftest="from pytest_vllm_cleanup.checks import gate\ndef broken(config):\n    return 1 / 0\n"
        "gate.shares_of = broken\n",
    )
    assert result.parseoutcomes() == {"passed": 2, "leaked": 1, "warnings": 1}
    result.stdout.fnmatch_lines(["*looking whether there is room for LLMEngine number * went wrong*ZeroDivisionError*"])


def test_with_checks_off_there_are_no_leaks_to_remember(run):
    result = run(ENGINE + "def test_next():\n    engine()\n", "--vllm-cleanup-check=off")
    assert result.parseoutcomes() == {"passed": 2}


@pytest.mark.parametrize("value", ["fail", "quarantine", "exit"])
def test_the_values_are_those_that_are_documented(value):
    assert config.one_of(config.ON_LEAK)(value) == value
    assert config.Settings(on_leak=value).header() == (
        "" if value == "quarantine" else f"vllm-cleanup: on-leak={value}"
    )


@pytest.mark.parametrize("source", ["ini", "environment"])
def test_restart_for_all_runs_is_quarantine_where_no_worker_runs_the_tests(run, pytester, monkeypatch, source):
    if source == "ini":
        pytester.makeini("[pytest]\nvllm_cleanup_on_leak = restart\n")
    else:
        monkeypatch.setenv("PYTEST_VLLM_CLEANUP_ON_LEAK", "restart")
    result = run(ENGINE + "def test_next():\n    engine()\n")
    assert "on-leak=quarantine (restart is for workers of pytest-xdist)" in result.stdout.str()
    assert "DeviceQuarantinedError" in result.stdout.str()


def test_another_value_ends_the_run_with_the_valid_ones(run):
    result = run("def test_it():\n    pass\n", "--vllm-cleanup-on-leak=stop")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --vllm-cleanup-on-leak: expected one of fail, quarantine, exit, restart, got 'stop'"]
    )
