"""Deaths that end pytest: nothing of its engines outlives it, and the next run can build its own."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from .records import Records
from .runs import IN_CHILDREN, MODES, Blow, Fate, Run

WAITS, WITH_A_WORKER = "fatal.py::test_waits", "fatal.py::test_waits_with_a_worker"
SLOW_TEARDOWN = "fatal.py::test_has_a_fixture_with_a_slow_teardown"


def _everywhere(mode: str) -> list[Run]:
    sigint, sigterm, sigkill = (Blow("ready", number) for number in (SIGINT, SIGTERM, SIGKILL))
    building = {"started": False}
    return [
        Run("Ctrl-C in the call", mode, WAITS, (2,), blows=(sigint,)),
        Run("Ctrl-C in a fixture's teardown", mode, SLOW_TEARDOWN, (2,), blows=(sigint,)),
        Run("Ctrl-C while an engine is built", mode, WAITS, (2,), blows=(Blow("building", SIGINT),), **building),
        # With which status pytest ends when it is interrupted at the end of a session is not ours to say.
        Run("a second Ctrl-C while closing", mode, WAITS, (), blows=(sigint, Blow("closing", SIGINT))),
        Run("SIGTERM in the call", mode, WAITS, (143,), blows=(sigterm,)),
        Run("SIGKILL in the call", mode, WAITS, (-9,), blows=(sigkill,)),
        Run("pytest.exit", mode, "fatal.py::test_pytest_exit", (7,)),
        Run("INTERNALERROR", mode, "fatal.py::test_passes", (3,), ("-p", "chaos_internal_error")),
        # Last, to show that all others have left room.
        Run("none", mode, "fatal.py::test_passes", seconds=0),
    ]


def _with_children() -> list[Run]:
    # Of an engine in pytest's own process nothing can outlive what ends that, so these are played with children alone.
    sigkill, building = Blow("building", SIGKILL), {"started": False}
    terminal = (Blow("ready", SIGINT, group=True),)
    terminated, killed = ((Blow("building", number),) for number in (SIGTERM, SIGKILL))
    return [
        Run("SIGKILL while an engine is built", IN_CHILDREN, WAITS, (-9,), blows=(sigkill,), **building),
        Run("os._exit in the test", IN_CHILDREN, "fatal.py::test_os_exit", (5,)),
        Run("segfault of pytest", IN_CHILDREN, "fatal.py::test_segfault", (-11,)),
        Run("pytest-timeout by thread", IN_CHILDREN, "fatal.py::test_timeout_by_thread", (1,)),
        Run("-x", IN_CHILDREN, "fatal.py::test_fails", (1,), ("-x",)),
        Run("--maxfail", IN_CHILDREN, "fatal.py::test_fails", (1,), ("--maxfail=2",)),
        Run("Ctrl-C in a terminal, to the whole process group", IN_CHILDREN, WAITS, (2,), blows=terminal),
        Run("SIGTERM while an engine is built", IN_CHILDREN, WAITS, (143,), blows=terminated, started=False),
        Run("SIGKILL while a worker starts", IN_CHILDREN, WITH_A_WORKER, (-9,), blows=killed, started=False),
        Run("SIGKILL, engine with a worker", IN_CHILDREN, WITH_A_WORKER, (-9,), blows=(Blow("ready", SIGKILL),)),
    ]


RUNS = [*(run for mode in MODES for run in _everywhere(mode)), *_with_children()]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_nothing_outlives_pytest_and_the_next_run_works(run: Run, fate: Fate, records: Records) -> None:
    problems = fate.problems()
    records.add_run(fate, problems)
    assert not problems, fate.output[-6000:]
