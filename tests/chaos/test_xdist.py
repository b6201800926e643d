"""A worker of pytest-xdist is killed: its engine is gone, and the worker that replaces it can build the next one."""

from __future__ import annotations

from signal import SIGKILL

import pytest

from .records import Records
from .runs import GONE_WITHIN, MODES, Blow, Fate, Run

RUNS = [
    Run("worker of pytest-xdist is killed", mode, "spread.py", (1,), ("-n", "1"), (Blow("ready", SIGKILL),), seconds=40)
    for mode in MODES
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_next_worker_builds_its_engine(run: Run, fate: Fate, records: Records) -> None:
    problems = fate.problems()
    next_engine = fate.engines() == 2
    if not next_engine or "worker 'gw0' crashed" not in fate.output:
        problems.append("the next worker built no engine")
    killed = min((note["time"] for note in fate.events("ready")), default=fate.ended)
    # The worker and all that it had started; the first of the family is pytest itself, which goes on.
    orphans = [seen for seen in fate.family[1:] if seen.first < killed]
    until_gone = max([0.0, *(seen.last - killed for seen in orphans)])
    if until_gone > GONE_WITHIN:
        problems.append(f"orphans were gone after {until_gone:.1f} s")
    records.add(
        fate,
        death=run.death,
        processes_seen=len(orphans),
        seconds_until_gone=until_gone,
        device_bytes_stayed=fate.stayed,
        problems=problems,
        exit_status=fate.status,
        next_engine_started=next_engine,
    )
    assert not problems, fate.output[-6000:]
