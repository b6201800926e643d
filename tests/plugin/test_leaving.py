"""How a run ends that is told to end, without engines: the plugin must be no trouble."""

from __future__ import annotations

import signal
from textwrap import dedent

import pytest

TERMINATED = """
import os, signal, time

@pytest.fixture
def resource():
    yield
    print("torn down", flush=True)

@pytest.mark.gpu_released
def test_one(resource):
    {first}
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)

def test_never():
    raise AssertionError
"""


def test_sigterm_tears_fixtures_down_and_tells_the_shell(run):
    result = run(TERMINATED.format(first="pass"), "-s")
    assert result.ret == 128 + signal.SIGTERM
    result.stdout.fnmatch_lines(["*torn down*", "*Terminated: by SIGTERM*"])
    assert "AssertionError" not in result.stdout.str()


def test_a_test_that_swallows_every_exception_does_not_swallow_sigterm(run):
    source = TERMINATED.replace(
        "    time.sleep(10)", "    try:\n        time.sleep(10)\n    except Exception:\n        pass"
    )
    assert run(source.format(first="pass"), "-s").ret == 128 + signal.SIGTERM


def test_the_users_own_handler_is_the_one_that_counts(run):
    conftest = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("theirs"))
"""
    result = run(
        TERMINATED.format(first="pass").replace("time.sleep(10)", "pass"), "-s", "-k", "one", conftest=conftest
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*theirs*"])


def test_a_run_without_any_marked_test_has_pythons_own_handler(run):
    result = run("import signal\ndef test_one():\n    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL")
    result.assert_outcomes(passed=1)


def test_a_forked_child_dies_of_sigterm_as_it_would(run):
    result = run(
        dedent("""
        import os, signal, time

        @pytest.mark.gpu_released
        def test_one():
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        """)
    )
    result.assert_outcomes(passed=1)


def test_the_handler_goes_with_the_run(pytester, run):
    result = run(
        dedent("""
        import signal

        pytest_plugins = ["pytester"]

        def test_inner(pytester):
            pytester.makepyfile(test_other="import pytest\\n@pytest.mark.gpu_released\\ndef test_one(): pass")
            pytester.inline_run("-p", "vllm_cleanup").assertoutcome(passed=1)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """)
    )
    result.assert_outcomes(passed=1)


def test_no_helper_process_without_an_engine(run):
    result = run(
        dedent("""
        import psutil

        @pytest.mark.gpu_released
        def test_one():
            pass

        def test_two():
            assert not psutil.Process().children()
        """)
    )
    result.assert_outcomes(passed=2)


def test_a_worker_of_xdist_is_left_to_the_watchdog(run):
    pytest.importorskip("xdist")
    result = run(
        dedent("""
        import signal

        @pytest.mark.gpu_released
        def test_one():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """),
        "-p",
        "xdist.plugin",
        "-n1",
    )
    result.assert_outcomes(passed=1)


def test_a_forked_child_in_native_code_dies_of_sigterm(run):
    result = run(
        dedent("""
        import multiprocessing, time

        def wait():
            import ctypes
            ctypes.CDLL(None).sleep(20)  # which a handler of Python's would have to wait for

        @pytest.mark.gpu_released
        def test_one():
            child = multiprocessing.get_context("fork").Process(target=wait)
            child.start()
            time.sleep(0.3)
            child.terminate()
            child.join(5)
            assert child.exitcode == -15
        """)
    )
    result.assert_outcomes(passed=1)


def test_an_inner_run_leaves_the_engines_of_the_outer_one_alone(run):
    result = run(
        dedent("""
        from pytest_vllm_cleanup.engines.registry import CloseReport, Owner, State, registry

        pytest_plugins = ["pytester"]

        def test_inner(pytester):
            owner, registry.owner = registry.owner, lambda: Owner("outer.py::test", "setup", "llm", "session")
            handle = registry.begin("LLMEngine")
            registry.owner = owner
            handle.state, handle.in_process = State.LIVE, False
            pytester.makepyfile(test_other="import pytest\\n@pytest.mark.gpu_released\\ndef test_one(): pass")
            pytester.inline_run("-p", "vllm_cleanup").assertoutcome(passed=1)
            assert handle.state is State.LIVE
            registry.closed(handle, CloseReport())
        """)
    )
    result.assert_outcomes(passed=1)
