"""What is done about a leak: find who holds it, close what can be closed, and see what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_vllm_cleanup.checks.check import ReleaseCheck, current_ledger
from pytest_vllm_cleanup.checks.debts import debts_of
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.diagnosis.diagnose import who_holds, who_holds_engines
from pytest_vllm_cleanup.diagnosis.findings import Diagnosis
from pytest_vllm_cleanup.engines.close import close_handle
from pytest_vllm_cleanup.engines.registry import EngineHandle, registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory import Reading, Snapshot, format_size
from pytest_vllm_cleanup.memory.units import MIB


def conclude(
    check: ReleaseCheck,
    abandoned: tuple[EngineHandle, ...],
    let_go: Callable[[], None],
    blamed: Callable[[Result], str],
    base: str,
    note: Callable[[Result], None],
) -> Result:
    """Come to the verdict. If it is a leak, find who holds it; in any case close the engines that should be gone.

    Args:
        check: the check, at its end.
        abandoned: the engines that should be gone.
        let_go: gives up references that are no leak.
        blamed: tells for a result which fixtures of wider scope are to blame, "" for the test itself.
        base: the folder to which paths are relative.
        note: takes the verdict down, before the search begins: a time limit of the user's may end that.
    """
    known, diagnosis = _engines_by_pid(), None
    try:
        result = check.finish(abandoned, let_go)
        result = replace(result, owner=blamed(result))
        note(result)
        if abandoned:
            with guarded("looking for who holds the engines"):
                diagnosis = _who_holds_engines(abandoned, base)
    finally:  # also where a timeout ends the waiting
        notes = [_close(handle) for handle in abandoned]
    result = replace(result, diagnosis=diagnosis, notes=notes)
    if result.leaked:
        with guarded("looking for who holds the memory"):
            result = _who_holds_the_rest(check, result, known, base)
    return result


def explain(check: ReleaseCheck, result: Result, alive: tuple[EngineHandle, ...]) -> Result:
    """Complete a result that leaked where nothing is closed: the engines' holders, else those of the memory.

    Args:
        check: the check, after its verdict.
        result: what it found.
        alive: engines that should be gone.
    """
    if alive:
        return replace(result, diagnosis=_who_holds_engines(alive, None))
    return _who_holds_the_rest(check, result, _engines_by_pid(), None)


def _who_holds_engines(engines: tuple[EngineHandle, ...], base: str | None) -> Diagnosis:
    # To be asked before they are closed, which takes them apart.
    return who_holds_engines(
        {str(handle): handle.parts["engine"] for handle in engines if "engine" in handle.parts}, base
    )


def _who_holds_the_rest(check: ReleaseCheck, result: Result, engines: dict[int, str], base: str | None) -> Result:
    if result.abandoned:
        remains, rest = check.remains()
        result = replace(result, remains=remains, notes=[*result.notes, *_given_back(result.after, rest)])
    else:
        remains, rest = result.verdict, result.after
    diagnosis, debts = result.diagnosis or Diagnosis(), []
    if remains.outcome == "leaked":
        inventory = check.inventory
        diagnosis = diagnosis.plus(who_holds(remains, check.baseline, rest, inventory, engines, base))
        with guarded("following the leak"):
            debts = [debt for device in result.left for debt in debts_of(device, inventory)]
            current_ledger().owe(debts)
    return replace(result, diagnosis=diagnosis, debts=tuple(debts))


def _close(handle: EngineHandle) -> str:
    return f"closed {handle} in {close_handle(handle).seconds:.1f} s, after the verdict"


def _given_back(before: Snapshot, after: Snapshot) -> list[str]:
    notes = []
    for device, reading in after.items():
        was, now = _ours(before.get(device, reading)), _ours(reading)
        if was is not None and now is not None and was - now >= MIB:
            notes.append(f"that gave back {format_size(was - now)} on {device}")
    return notes


def _ours(reading: Reading) -> int | None:
    if reading.own is None or reading.children is None:
        return reading.used
    return reading.own + reading.children


def _engines_by_pid() -> dict[int, str]:
    # While an engine is still recorded.
    return {process.pid: _short(handle) for handle in registry.handles() for process in handle.processes}


def _short(handle: EngineHandle) -> str:
    return f"{handle.kind} number {handle.number}"
