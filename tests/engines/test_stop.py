"""Ending the processes of an engine, with real processes that stand for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker

import psutil
import pytest

from pytest_vllm_cleanup.engines import stop
from pytest_vllm_cleanup.engines.registry import EngineHandle, Owner
from pytest_vllm_cleanup.engines.traces import ProcessId, Traces

PATIENT = "import sys; print('up', flush=True); sys.stdin.read()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {PATIENT}"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline()
        try:
            yield started
        finally:
            started.kill()


def recorded(*processes: subprocess.Popen[bytes]) -> EngineHandle:
    identities = {ProcessId(each.pid, psutil.Process(each.pid).create_time()) for each in processes}
    return EngineHandle(1, "LLMEngine", Owner(), traces=Traces(children=frozenset(identities)))


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_GRACE", 0.3)


def test_a_process_that_stays_is_terminated() -> None:
    with process(PATIENT) as one:
        stop.end_processes(recorded(one))
        assert one.wait(5) == -15


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with process(STUBBORN) as one:
        stop.end_processes(recorded(one))
        assert one.wait(5) == -9


def test_only_recorded_processes_are_touched() -> None:
    with ExitStack() as stack:
        ours, bystander = (stack.enter_context(process(PATIENT)) for _ in range(2))
        stop.end_processes(recorded(ours))
        assert bystander.poll() is None


def test_a_recycled_number_is_not_our_process() -> None:
    with process(PATIENT) as one:
        handle = recorded(one)
        (identity,) = handle.traces.children
        handle.traces.children = frozenset({replace(identity, started=identity.started - 60)})
        stop.end_processes(handle)
        assert one.poll() is None


def test_pythons_helper_for_shared_memory_is_left_to_the_session() -> None:
    resource_tracker.ensure_running()
    helper = psutil.Process(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    handle = recorded()
    handle.traces.children = frozenset({ProcessId(helper.pid, helper.create_time())})
    stop.end_processes(handle)
    assert helper.is_running()


def test_a_process_that_survives_everything_is_an_error_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with process(PATIENT) as one:
        for signal in ("terminate", "kill"):
            monkeypatch.setattr(psutil.Process, signal, lambda _self: None)
        with pytest.raises(TimeoutError, match=f"still running after SIGKILL: {one.pid}"):
            stop.end_processes(recorded(one))
