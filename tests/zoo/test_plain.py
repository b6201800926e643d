"""Kinds without an engine, in host memory: nearly all of them in one process, one after another."""

from __future__ import annotations

import pytest

from .catalogue import Kind, kinds
from .inner import Run
from .keeper import Keeper

PLAIN = Run("without an engine", kinds("objects", "lookalikes", "processes", places=("cpu",)), seconds=90)
SESSIONS = [Run(kind.name, (kind,)) for kind in kinds("first", "sessions", places=("cpu",))]


@pytest.mark.parametrize(("run", "kind"), PLAIN.cases())
def test_it_is_judged_rightly(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)


@pytest.mark.parametrize(("run", "kind"), [case for run in SESSIONS for case in run.cases()])
def test_what_lives_to_the_end_of_the_session_is_judged_there(keeper: Keeper, run: Run, kind: Kind) -> None:
    keeper.outcome(run).check(kind)
