"""The catalogue, and how what was said is compared with what must be said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from .catalogue import KINDS, Kind, kinds
from .inner import InnerRun, Run, like
from .kinds.zoo_expect import CLEAN, MIB, Expect

ALL = kinds(*(folder.name for folder in KINDS.iterdir() if folder.is_dir()))
LEAK = Kind(KINDS / "objects" / "a_kind.py", "", Expect(holder="module global KEPT[*] -> Tensor", stayed=96 * MIB))
SAID = {
    "outcome": "leaked",
    "stayed": 96 * MIB,
    "holder": "module global KEPT[0] -> Tensor",
    "diagnosis": [],
    "devices": [{"device": "host", "outcome": "leaked", "reason": "host"}],
}


def _run(kind: Kind, said: dict[str, Any], test: str = "passed", left: int = 0) -> InnerRun:
    about = {"module": kind.file.stem, "test": "test_it"}
    return InnerRun(
        Run("some kinds", (kind,)),
        notes=[
            {"event": "begin", "taken": 0},
            {"event": "report", **about, "when": "call", "outcome": test, "memory": None, "text": ""},
            {"event": "report", **about, "when": "teardown", "outcome": "passed", "memory": said, "text": ""},
            {"event": "let go", "module": kind.file.stem, "taken": left},
            {"event": "let go", "module": "the next one", "taken": left},
        ],
    )


def test_there_are_many_kinds_with_a_name_and_a_description_each():
    leaks = [kind for kind in ALL if kind.expect.outcome == "leaked"]
    assert len(leaks) >= 30
    assert len(ALL) - len(leaks) >= 20
    assert all(kind.about for kind in ALL)
    assert all(kind.expect.holder or kind.expect.says for kind in leaks)
    assert max(Counter(kind.file.stem for kind in ALL).values()) == 1  # the diary knows them by it


def test_only_a_star_stands_for_anything():
    assert like("module global KEPT[0] -> * -> Tensor", "module global KEPT[0] -> LLM.x -> Tensor")
    assert not like("module global KEPT[0] -> Tensor", "module global KEPT0 -> Tensor")
    assert not like("KEPT*", "module global KEPT")


def test_what_is_as_expected_is_right():
    assert _run(LEAK, SAID).problems(LEAK) == []


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"outcome": "released"}, "released, expected leaked"),
        ({"stayed": 48 * MIB}, f"{48 * MIB} bytes stayed"),
        ({"holder": "thread 'loader'"}, "the holder is \"thread 'loader'\""),
        ({"owner": "module-scoped fixture 'model'"}, "it is charged to"),
        ({"devices": [{"outcome": "leaked", "reason": "processes"}]}, "the reason is processes"),
        ({"diagnosis": ["held by x: module global __loader__ -> y"]}, "nobody would write"),
    ],
)
def test_what_is_not_as_expected_is_told(said: dict[str, Any], problem: str):
    problems = _run(LEAK, {**SAID, **said}).problems(LEAK)
    assert len([text for text in problems if text.startswith(problem)]) == 1


def test_another_end_of_the_test_is_told():
    assert "the test failed, expected passed" in _run(LEAK, SAID, test="failed").problems(LEAK)[0]


def test_memory_that_the_next_kind_would_inherit_is_told():
    assert "to the next kind" in _run(LEAK, SAID, left=96 * MIB).problems(LEAK)[0]


def test_a_clean_kind_that_is_flagged_is_told():
    clean = replace(LEAK, expect=CLEAN)
    assert _run(clean, SAID).problems(clean)[0].startswith("leaked, expected released")
    assert _run(clean, {**SAID, "outcome": "released", "devices": []}).problems(clean) == []


def test_a_kind_that_was_not_run_is_told():
    assert "did not run" in InnerRun(Run("some kinds", (LEAK,)), status=3).problems(LEAK)[0]
