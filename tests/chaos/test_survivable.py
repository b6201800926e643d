"""Deaths that pytest survives: one run for each mode, in which each test builds an engine and dies in its own way."""

from __future__ import annotations

import pytest

from .family import Seen
from .records import Records
from .runs import GONE_WITHIN, IN_CHILDREN, IN_PROCESS, Fate, Run

# What becomes of each test, in the order in which they run.
OUTCOMES = {
    "assert": "failed",
    "bad_arguments": "failed",
    "xfail": "xfailed",
    "corrupt_weights": "failed",
    "timeout_by_signal": "failed",
    "kv_cache_too_large": "failed",
    "segfault_of_the_core": "failed",
    "interrupted_in_warm_up": "passed",
    "sigkill_of_the_core": "failed",
    "sigkill_of_a_worker": "failed",
    "stuck_core": "passed",
    "stuck_worker": "passed",
    "out_of_memory": "failed",
    "nothing_happens": "passed",
}
WITHOUT_AN_ENGINE = {"bad_arguments", "corrupt_weights", "kv_cache_too_large", "interrupted_in_warm_up"}
ONLY_IN_CHILDREN = {death for death in OUTCOMES if "core" in death or "worker" in death}
RUNS = {
    mode: Run("deaths that pytest survives", mode, "survivable.py", (1,), seconds=seconds)
    for mode, seconds in ((IN_PROCESS, 30), (IN_CHILDREN, 200))
}
DEATHS = {mode: [death for death in OUTCOMES if mode == IN_CHILDREN or death not in ONLY_IN_CHILDREN] for mode in RUNS}
CASES = [pytest.param(RUNS[mode], death, id=f"{death}, {mode}") for mode in RUNS for death in DEATHS[mode]]


@pytest.mark.parametrize(("run", "death"), CASES)
def test_nothing_outlives_the_test_and_the_next_one_works(run: Run, death: str, fate: Fate, records: Records) -> None:
    test = f"test_{death}"
    verdicts = [note for note in fate.events("report", test) if note["when"] == "teardown"]
    ends = [note["time"] for note in fate.events("end", test)]
    problems = [] if verdicts and ends else ["the test did not come to its end"]
    outcomes = {note["when"]: note["outcome"] for note in fate.events("report", test)}
    if outcomes.get("call") != OUTCOMES[death]:
        problems.append(f"{outcomes}, expected {OUTCOMES[death]}")
    stayed = None
    for note in verdicts:
        released = note["properties"].get("gpu_memory_outcome")
        stayed = note["properties"].get("gpu_memory_stayed_bytes", 0 if released == "released" else None)
        if note["outcome"] != "passed" or released == "leaked":
            problems.append(f"teardown {note['outcome']}, memory {released}: {note['text']}")
    own, until_gone = _processes(fate, test), 0.0
    if ends:
        until_gone = max([0.0, *(seen.last - ends[0] for seen in own)])
    if until_gone > GONE_WITHIN:
        problems.append(f"processes were gone after {until_gone:.1f} s: {', '.join(map(str, own))}")
    if run.mode == IN_CHILDREN and not own and death not in WITHOUT_AN_ENGINE:
        problems.append("no process was seen")
    records.add(
        fate,
        death=death,
        processes_seen=len(own),
        seconds_until_gone=until_gone,
        device_bytes_stayed=stayed,
        problems=problems,
        next_engine_started=_next_engine_started(fate, death),
    )
    assert not problems, fate.output[-6000:]


@pytest.mark.parametrize("run", RUNS.values(), ids=str)
def test_nothing_outlives_the_session(run: Run, fate: Fate, records: Records) -> None:
    problems = fate.problems()
    records.add_run(fate, problems)
    assert not problems, fate.output[-6000:]


def _processes(fate: Fate, test: str) -> list[Seen]:
    """Return the processes of engines that a test started."""
    began, ended = _span(fate, test)
    return [seen for seen in fate.family[1:] if seen.of_engine and began <= seen.first < ended]


def _next_engine_started(fate: Fate, death: str) -> bool | None:
    """Return whether the next test that builds an engine could; None if this is the last one."""
    order = DEATHS[fate.run.mode]
    later = [name for name in order[order.index(death) + 1 :] if name not in WITHOUT_AN_ENGINE]
    return fate.engines(*_span(fate, f"test_{later[0]}")) > 0 if later else None


def _span(fate: Fate, test: str) -> tuple[float, float]:
    """Return when a test began and ended; after the run, if it never did."""
    began, ended = (
        min((note["time"] for note in fate.events(event, test)), default=fate.ended) for event in ("start", "end")
    )
    return began, ended
