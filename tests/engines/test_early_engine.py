"""An engine that was there before this package looked, as one that a conftest builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
from engine_lab import Lab

from pytest_vllm_cleanup import close_engine

pytestmark = pytest.mark.engine


def close_a_later_one(model: str) -> dict[str, Any]:
    early = tools.build_unseen(model)
    tokens = tools.tokens(early)
    later = tools.build(model)
    gone = tools.watch(later)
    errors = close_engine(later).errors
    again = [tools.tokens(early) == tokens for _ in range(2)]
    early_gone, later_gone = tools.watch(early), gone()
    errors += close_engine(early).errors
    return {"errors": errors, "same tokens": again, "later gone": later_gone, "early gone": early_gone()}


def test_closing_a_later_engine_leaves_an_early_one_whole(fresh_lab: Lab, model: Path) -> None:
    seen = fresh_lab(close_a_later_one, model)
    assert seen == {"errors": [], "same tokens": [True, True], "later gone": [], "early gone": []}
