"""Kinds with real engines, on the CPU build of vLLM: one inner run for each place where engines live."""

from __future__ import annotations

import pytest

from .catalogue import Kind, kinds
from .inner import IN_CHILDREN, IN_PROCESS, Run
from .keeper import Keeper

pytestmark = pytest.mark.engine
INSIDE = Run("engines in process", kinds("engines", places=("cpu", "in process")), environ=IN_PROCESS, seconds=30)
OUTSIDE = Run(
    "engines in child processes", kinds("engines", places=("cpu", "child processes")), environ=IN_CHILDREN, seconds=60
)


@pytest.mark.parametrize(("run", "kind"), INSIDE.cases())
def test_in_process(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.parametrize(("run", "kind"), OUTSIDE.cases())
def test_in_child_processes(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)
