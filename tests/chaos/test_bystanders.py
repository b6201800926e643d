"""Processes of the same user that look like engines: whatever becomes of the engines, nobody touches them."""

from __future__ import annotations

from signal import SIGKILL

import pytest

from .records import Records
from .runs import IN_CHILDREN, IN_PROCESS, Blow, Fate, Run

KILLED = "SIGKILL among bystanders"
RUNS = [
    *(
        Run(KILLED, mode, "beside.py::test_waits", (-9,), blows=(Blow("ready", SIGKILL),), bystander=True)
        for mode in (IN_PROCESS, IN_CHILDREN)
    ),
    Run("a stuck engine among bystanders", IN_CHILDREN, "beside.py::test_stuck", bystander=True, seconds=30),
    Run("closing among bystanders", IN_CHILDREN, "beside.py::test_closed", bystander=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_they_get_no_signal_and_live_on(run: Run, fate: Fate, records: Records) -> None:
    problems = fate.problems()
    # Beside pytest, below it, and started by another thread while the engine was built.
    if len(fate.bystanders) != 3:
        problems.append(f"{len(fate.bystanders)} bystanders, expected 3")
    records.add_run(fate, problems)
    assert not problems, fate.output[-6000:]
