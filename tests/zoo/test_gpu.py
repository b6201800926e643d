"""All kinds on a real GPU, one inner run after another."""

from __future__ import annotations

import pytest

from .catalogue import Kind, kinds
from .inner import IN_CHILDREN, IN_PROCESS, Run
from .keeper import Keeper

pytestmark = pytest.mark.gpu
PLACES = ("cuda",)
OBJECTS = Run("objects on a GPU", kinds("cuda", "lookalikes", "objects", places=PLACES), "cuda", seconds=90)
PROCESSES = Run("processes on a GPU", kinds("processes", places=PLACES), "cuda", seconds=60)
# What only the first test of a process sees, or the last.
ALONE = [Run(f"{kind.name} on a GPU", (kind,), "cuda") for kind in kinds("first", "sessions", places=PLACES)]
INSIDE = Run(
    "engines in process on a GPU", kinds("engines", places=("cuda", "in process")), "cuda", IN_PROCESS, seconds=90
)
OUTSIDE = Run(
    "engines in child processes on a GPU",
    kinds("engines", places=("child processes",)),
    "cuda",
    IN_CHILDREN,
    seconds=90,
)


@pytest.mark.parametrize(("run", "kind"), OBJECTS.cases())
def test_objects(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.parametrize(("run", "kind"), PROCESSES.cases())
def test_processes(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.parametrize(("run", "kind"), [case for run in ALONE for case in run.cases()])
def test_what_needs_a_session_of_its_own(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.engine
@pytest.mark.parametrize(("run", "kind"), INSIDE.cases())
def test_engines_in_process(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.engine
@pytest.mark.parametrize(("run", "kind"), OUTSIDE.cases())
def test_engines_in_child_processes(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)
