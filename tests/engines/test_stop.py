"""Ending the processes of an engine, with real processes that stand for them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from programs import FAMILY, PATIENT, STUBBORN

from pytest_vllm_cleanup.devices.starts import StartLocks
from pytest_vllm_cleanup.engines import children, deadline, drain, measure, stop
from pytest_vllm_cleanup.engines.close import close_handle
from pytest_vllm_cleanup.engines.registry import CloseReport, EngineHandle, Owner, State, registry
from pytest_vllm_cleanup.guard import VllmCleanupWarning
from pytest_vllm_cleanup.memory import ProcessUse, Reading
from pytest_vllm_cleanup.processes import proc, reap
from pytest_vllm_cleanup.processes.proc import ProcessId
from pytest_vllm_cleanup.processes.watchdog import current_watchdog
from pytest_vllm_cleanup.workers import starting


@contextmanager
def process(code: str = PATIENT) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as started:
        assert started.stdout is not None
        started.line = started.stdout.readline()  # type: ignore[attr-defined]
        try:
            yield started
        finally:
            started.kill()


def identity(one: subprocess.Popen[str]) -> ProcessId:
    found = proc.identify(one.pid)
    assert found is not None
    return found


def recorded(*processes: subprocess.Popen[str], state: State = State.CLOSING) -> EngineHandle:
    return EngineHandle(1, "LLMEngine", Owner(), state=state, processes=frozenset(map(identity, processes)))


def ended(handle: EngineHandle) -> CloseReport:
    report = CloseReport()
    stop.end_processes(handle, report)
    return report


class Client:
    """Stands for vLLM's client of an engine core."""

    def __init__(self, shutdown: Callable[[], None]) -> None:
        self.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))
        self.limits: list[float | None] = []
        self._shutdown = shutdown

    def shutdown(self, timeout: float | None = None) -> None:
        self.limits.append(timeout)
        self._shutdown()


class Engine:
    """Stands for an engine in child processes."""

    def __init__(self, client: Any) -> None:
        self.engine_core = client


@contextmanager
def engine(one: subprocess.Popen[str], client: Any) -> Iterator[EngineHandle]:
    built = Engine(client)
    handle = registry.begin("LLMEngine")
    registry.attach(handle, built)
    handle.state, handle.in_process = State.LIVE, False
    children.add(handle, [identity(one)])
    yield handle
    del built


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_GRACE", 0.3)


@pytest.fixture(autouse=True)
def no_helper_stays() -> Iterator[None]:
    yield
    current_watchdog().close()


def test_a_process_that_goes_by_itself_is_only_waited_for() -> None:
    with process("import time; print('up', flush=True); time.sleep(0.1)") as one:
        assert [name for name, _, _ in ended(recorded(one)).steps] == ["wait for its processes", "wait for the driver"]
        assert one.wait(5) == 0


def test_a_process_that_stays_is_terminated() -> None:
    with process() as one:
        report = ended(recorded(one))
        assert one.wait(5) == -15
    assert "terminate its processes" in [name for name, _, _ in report.steps]
    assert report.errors == []
    assert 0.3 <= report.steps[0][1] < 3


def test_a_process_that_ignores_sigterm_is_killed_and_named() -> None:
    with process(STUBBORN) as one:
        report = ended(recorded(one))
        assert one.wait(5) == -9
    (error,) = report.errors
    assert error.startswith(
        f"kill its processes: TimeoutError: had not ended 0.3 s after SIGTERM, and were killed: {one.pid} ("
    )


def test_a_worker_whose_core_has_died_is_ended_too() -> None:
    with process(FAMILY) as core:
        handle = recorded(core)
        worker = proc.identify(int(core.line))  # type: ignore[attr-defined]
        assert worker is not None
        children.add(handle, [identity(core)])
        assert worker in current_watchdog().known(handle.number)
        handle.processes = frozenset({identity(core)})  # this process has not seen the worker
        current_watchdog()._engines[handle.number] |= {worker}
        core.kill()
        core.wait()
        ended(handle)
        assert not proc.is_running(worker)


def test_the_processes_of_a_failed_start_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_GRACE", 5.0)
    with process() as one:
        begun = time.monotonic()
        ended(recorded(one, state=State.FAILED))
        assert one.wait(5) == -15
    assert time.monotonic() - begun < 2


def test_only_recorded_processes_are_touched() -> None:
    with ExitStack() as stack:
        ours, bystander = (stack.enter_context(process()) for _ in range(2))
        ended(recorded(ours))
        assert bystander.poll() is None


def test_a_recycled_number_is_not_our_process() -> None:
    with process() as one:
        handle = recorded(one)
        former = replace(identity(one), started=identity(one).started - 60)
        handle.processes = frozenset({former})
        ended(handle)
        assert one.poll() is None


def test_an_engine_without_processes_has_no_stages() -> None:
    assert ended(recorded()).steps == []


def test_a_process_that_survives_everything_is_an_error_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with process() as one:
        monkeypatch.setattr(reap, "send", lambda *_: False)
        (error,) = ended(recorded(one)).errors
    assert f"still running 0.3 s after SIGKILL: {one.pid} (" in error


def test_vllms_own_shutdown_gets_a_limit_where_it_takes_one() -> None:
    with process() as one:
        client = Client(one.kill)
        with engine(one, client) as handle:
            report = stop.stop(handle)
    assert client.limits == [0.3]
    assert report.errors == []
    assert handle.state is State.CLOSED


def test_a_shutdown_that_takes_no_limit_gets_none() -> None:
    with process() as one:

        def shutdown() -> None:
            one.kill()

        with engine(one, SimpleNamespace(shutdown=shutdown)) as handle:
            assert stop.stop(handle).errors == []


def test_an_error_of_vllms_shutdown_is_reported_and_the_processes_are_ended() -> None:
    def shutdown() -> None:
        raise RuntimeError("no socket")

    with process() as one, engine(one, Client(shutdown)) as handle:
        report = stop.stop(handle)
        assert one.wait(5) == -15
    assert report.errors == ["shut it down: RuntimeError: no socket"]


def test_a_shutdown_that_hangs_on_its_processes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_LIMIT", 0.3)
    with process(STUBBORN) as one, engine(one, Client(lambda: one.wait() and None)) as handle:
        report = stop.stop(handle)
        assert one.wait(5) == -9
    assert "did not return within 0.3 s, and its processes were killed" in report.errors[0]


def test_a_second_interrupt_kills_at_once_and_is_passed_on() -> None:
    def shutdown() -> None:
        raise KeyboardInterrupt

    with process(STUBBORN) as one, engine(one, Client(shutdown)) as handle:
        with pytest.raises(KeyboardInterrupt):
            stop.stop(handle)
        assert one.wait(1) == -9
        assert handle in registry.handles()  # whoever ends the session tries again
        registry.closed(handle, CloseReport())


class Driver:
    """An NVML that drops processes some time after their end."""

    name = "nvml"
    reason = ""

    def __init__(self, readings: Callable[[], Reading]) -> None:
        self._readings = readings

    def available(self) -> bool:
        return True

    def read(self, _ours: frozenset[int]) -> dict[str, Reading]:
        return {"cuda:0": self._readings()}


def listing(*pids: int) -> Reading:
    uses = tuple(ProcessUse(pid, 1 << 30, "VLLM::EngineCore", ours=True) for pid in pids)
    return Reading(
        "cuda:0", used=len(pids) << 30, own=0, children=len(pids) << 30, others=0, processes=uses, listed=True
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Reading]], None]:
    def install(readings: Callable[[], Reading]) -> None:
        gauge = SimpleNamespace(meters=(Driver(readings),))
        monkeypatch.setattr(measure, "current_gauge", lambda: gauge)

    return install


GONE = ProcessId(2**22 + 1, 1)


def test_it_is_waited_until_the_driver_has_dropped_the_processes(driver: Callable[..., None]) -> None:
    begun = time.monotonic()
    driver(lambda: listing(GONE.pid) if time.monotonic() - begun < 0.3 else listing())
    measure.wait_until_dropped([GONE], False, 5)
    assert 0.3 <= time.monotonic() - begun < 1


def test_a_neighbour_on_the_device_is_not_waited_for(driver: Callable[..., None]) -> None:
    driver(lambda: listing(4711))
    begun = time.monotonic()
    measure.wait_until_dropped([GONE], False, 5)
    assert time.monotonic() - begun < 0.1


def test_a_driver_that_drops_nothing_is_an_error_with_process_and_device(driver: Callable[..., None]) -> None:
    driver(lambda: listing(GONE.pid))
    with pytest.raises(TimeoutError, match=rf"0.1 s after their end the driver still lists {GONE.pid} on cuda:0"):
        measure.wait_until_dropped([GONE], False, 0.1)


def test_where_processes_are_hidden_the_device_has_to_be_flat(driver: Callable[..., None]) -> None:
    begun = time.monotonic()

    def hidden() -> Reading:
        falling = max(0.0, 0.3 - (time.monotonic() - begun))
        return Reading("cuda:0", used=int(falling * 2**30))

    driver(hidden)
    measure.wait_until_dropped([GONE], False, 5)
    assert 0.5 <= time.monotonic() - begun < 2


def test_processes_that_were_listed_are_waited_for_by_name_alone(driver: Callable[..., None]) -> None:
    moments = iter(range(10**6))
    driver(lambda: Reading("cuda:0", used=next(moments), processes=()))  # never flat, and nothing is known of the list
    begun = time.monotonic()
    measure.wait_until_dropped([GONE], True, 5)
    assert time.monotonic() - begun < 0.1


def test_whether_a_process_is_listed_is_seen_while_it_runs(driver: Callable[..., None]) -> None:
    with process() as one:
        driver(lambda: listing(one.pid))
        assert measure.lists([identity(one)])
        assert not measure.lists([GONE])
        assert not measure.lists([replace(identity(one), started=1)])


def test_children_of_other_threads_are_not_the_engines() -> None:
    handle = registry.begin("LLMEngine")
    go, gone = threading.Event(), threading.Event()
    server: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        go.wait(10)
        server.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        gone.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with children.recorded(handle):
        core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        go.set()
        gone.wait(10)
    thread.join()
    try:
        assert {process.pid for process in handle.processes} == {core.pid}
        ended(handle)
        assert core.wait(5) == -signal.SIGTERM
        assert server[0].poll() is None
    finally:
        core.kill()
        server[0].kill()
        server[0].wait()
        registry.closed(handle, CloseReport())


def test_what_a_server_of_the_test_starts_meanwhile_is_not_the_engines() -> None:
    handle = registry.begin("LLMEngine")
    forking = "import subprocess, sys; print('up', flush=True); sys.stdin.readline(); " + FAMILY
    with process(forking) as server, children.recorded(handle):
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("\n")
        server.stdin.flush()
        child = proc.identify(int(server.stdout.readline()))
    assert child is not None
    assert proc.is_running(child)
    assert handle.processes == frozenset()
    reap.send(child, signal.SIGKILL)
    registry.closed(handle, CloseReport())


def test_a_new_thread_belongs_to_whoever_has_started_it() -> None:
    handle = registry.begin("LLMEngine")
    go = threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    def start_in_a_thread() -> None:
        go.wait(10)
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()

    theirs = threading.Thread(target=start_in_a_thread)
    theirs.start()
    with children.recorded(handle):
        go.set()
        theirs.join()
        ours = threading.Thread(target=start_in_a_thread)
        ours.start()
        ours.join()
    try:
        assert {process.pid for process in handle.processes} == {started[1].pid}
    finally:
        for one in started:
            one.kill()
            one.wait()
        ended(handle)
        registry.closed(handle, CloseReport())


def test_without_free_descriptors_an_engine_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with process() as one:
        handle = recorded(one)
        children.add(handle, [])
        current_watchdog().add(handle.number, handle.processes)
        with monkeypatch.context() as patched:
            patched.setattr(proc, "_open", full)
            errors = ended(handle).errors
        assert errors
        assert all("Too many open files" in error for error in errors)
        assert handle.number in current_watchdog()._engines  # which ends it when this process ends
        assert one.poll() is None
        ended(handle)


def test_closing_works_while_a_test_has_replaced_open_and_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> None:
        raise FileNotFoundError

    with process() as one:
        handle = recorded(one)
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", no_file)
            patched.setattr(time, "monotonic", lambda: 1.0)
            ended(handle)
        assert one.wait(5) == -15


def test_two_engines_that_are_built_at_once_have_their_own_processes() -> None:
    handles = [registry.begin("LLMEngine") for _ in range(2)]
    barrier = threading.Barrier(2)
    cores: dict[int, subprocess.Popen[bytes]] = {}

    def build(number: int) -> None:
        handles[number].thread = threading.get_ident()
        with children.recorded(handles[number]):
            barrier.wait(10)
            cores[number] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            barrier.wait(10)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        for number, handle in enumerate(handles):
            assert {process.pid for process in handle.processes} == {cores[number].pid}
    finally:
        for core in cores.values():
            core.kill()
            core.wait()
        for handle in handles:
            ended(handle)
            registry.closed(handle, CloseReport())


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, and each time that it is an engine's turn to be closed."""
    seen: list[str] = []

    @contextmanager
    def closing(handle: EngineHandle) -> Iterator[None]:
        seen.append(f"turn of {handle.state.value}")
        yield
        seen.append("over")

    monkeypatch.setattr(registry, "turns", SimpleNamespace(closing=closing))
    return seen


@pytest.mark.parametrize("in_process", [False, True])
def test_an_engine_is_closed_when_it_is_its_turn(turns: list[str], in_process: bool) -> None:
    with process() as one, engine(one, Client(lambda: turns.append("shut down"))) as handle:
        handle.in_process = in_process
        report = close_handle(handle)
    assert turns == ["turn of live", "shut down", "over"]
    assert report.steps[0][0] == "wait for its turn"


def test_an_engine_that_is_not_waited_for_any_more_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(_handle: EngineHandle) -> Any:
        raise KeyboardInterrupt

    handle = registry.begin("LLMEngine")
    handle.state, handle.in_process = State.DROPPED, True
    monkeypatch.setattr(registry, "turns", SimpleNamespace(closing=impatient))
    with pytest.raises(KeyboardInterrupt):
        drain.release_unreleased()
    monkeypatch.undo()
    assert drain.release_unreleased() == [handle]


def test_an_engine_is_closed_also_if_its_turn_cannot_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def broken(_handle: EngineHandle) -> Iterator[None]:
        yield
        raise OSError("no such lock")

    monkeypatch.setattr(registry, "turns", SimpleNamespace(closing=broken))
    handle = registry.begin("LLMEngine")
    handle.state, handle.in_process = State.DROPPED, True
    with pytest.warns(VllmCleanupWarning, match="giving up the turn of LLMEngine .* no such lock"):
        assert drain.release_unreleased() == [handle]
    assert handle.state is State.CLOSED


def test_waiting_for_a_turn_is_no_part_of_the_start_of_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def slow(_locks: StartLocks) -> Iterator[None]:
        time.sleep(0.6)
        yield

    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(StartLocks, "closing", slow)
    monkeypatch.setattr(registry, "turns", None)
    outer = starting.install()
    taken = registry.turns
    inner = starting.install()  # a run inside another one
    handle = registry.begin("LLMEngine")
    handle.state, handle.in_process = State.DROPPED, True
    with deadline.start_deadline(0.3, "LLM"):
        assert drain.release_unreleased() == [handle]
    inner()
    assert registry.turns is taken
    outer()
    assert registry.turns is None


def test_an_engine_is_killed_when_somebody_does_not_want_to_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(_handle: EngineHandle) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "turns", SimpleNamespace(closing=impatient))
    with process() as one, engine(one, Client(lambda: None)) as handle:
        with pytest.raises(KeyboardInterrupt):
            close_handle(handle)
        assert one.wait(5) == -signal.SIGKILL
        monkeypatch.undo()
        assert close_handle(handle).errors == []
        assert handle.state is State.CLOSED
