"""Who holds the memory that a test left: objects, then processes, then what lies below both.

Asked only after a leak. Bounded in time and memory, and nothing that was found stays referenced.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_vllm_cleanup.diagnosis import allocations, below, processes
from pytest_vllm_cleanup.diagnosis.allocations import Segments
from pytest_vllm_cleanup.diagnosis.chains import Chain, find_chains_to_each
from pytest_vllm_cleanup.diagnosis.findings import Diagnosis, Finding, grouped
from pytest_vllm_cleanup.diagnosis.tensors import Inventory, LiveStorage, tensors_on
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory import HOST, DeviceVerdict, Reading, Snapshot, Verdict
from pytest_vllm_cleanup.memory.tenants import changes

LIMIT = 5.0  # seconds for one diagnosis
_MOST_TENSORS = 12  # whose holders are looked for one by one
_MOST_FINDINGS = 6
_SMALL = 0.02  # of the biggest tensor: less than that is not worth a search
_MUCH = 0.25  # of what stayed: the holder of less than that is not named as the holder
_LITTLE = 0.01  # of what stayed: less than that is not worth a line
_OBJECTS = frozenset({"allocator", "allocator cache", "host"})
_clock = time.monotonic  # a test may have stopped it


def who_holds_engines(engines: Mapping[str, weakref.ref[Any]], base: str | None = None) -> Diagnosis:
    """Return who holds engines that should be gone.

    Args:
        engines: weak references to them, by what to call them.
        base: the folder to which paths are relative, the current one if None.
    """
    started = _clock()
    targets = [[engine()] for engine in engines.values()]
    found = find_chains_to_each(targets, deadline=started + LIMIT, base=base)
    findings = [
        Finding(f"still alive: {name}", None, "", tuple(map(str, chains)))
        for name, chains in zip(engines, found, strict=True)
    ]
    return _finished(started, findings)


def who_holds(
    verdict: Verdict,
    baseline: Snapshot,
    after: Snapshot,
    inventory: Inventory,
    engines: Mapping[int, str],
    base: str | None = None,
) -> Diagnosis:
    """Return who holds what stayed on each device that leaked.

    Args:
        verdict: the leak.
        baseline: readings before the test.
        after: readings now.
        inventory: the tensors that were there before the test, which are not to blame.
        engines: what to call the engine of a child process, by process id.
        base: the folder to which paths are relative, the current one if None.
    """
    started = _clock()
    deadline = started + LIMIT
    found: list[Finding] = []
    remarks: list[str] = []
    for device in verdict.leaks:
        before = baseline.get(device.device, Reading(device=device.device))
        now = after.get(device.device, Reading(device=device.device))
        tensors: list[Finding] = []
        if device.reason in _OBJECTS:
            with guarded(f"looking for tensors on {device.device}"):
                tensors = _tensors(device, inventory, deadline, base, remarks)
        found += tensors
        with guarded(f"looking for processes on {device.device}"):
            processes_found = _processes(device, before, now, engines)
            found += _weighed(processes_found, device.stayed) if device.device == HOST else processes_found
        explained = sum(finding.bytes or 0 for finding in tensors)
        if device.device != HOST and explained < device.stayed:
            with guarded(f"looking below the tensors of {device.device}"):
                found += _pools(device.device, inventory, deadline, base)
                remarks += below.below(device.device, before, now, inventory)
    return _finished(started, found, remarks)


def _weighed(findings: Iterable[Finding], stayed: int, *, cut_short: bool = False) -> Iterator[Finding]:
    """Iterate over those findings that explain something, and mark those that explain but little.

    Args:
        findings: what was found.
        stayed: the bytes to be explained.
        cut_short: whether there was no time to look at all tensors; then of many there may be many more.
    """
    for finding in findings:
        if finding.bytes is None or finding.bytes >= _MUCH * stayed:
            yield finding
        elif cut_short and finding.count > _MOST_TENSORS:
            yield replace(finding, what=f"of very many tensors, as far as there was time to look: {finding.what}")
        elif finding.bytes >= _LITTLE * stayed:
            yield replace(finding, minor=True)


def _tensors(
    device: DeviceVerdict, inventory: Inventory, deadline: float, base: str | None, remarks: list[str]
) -> list[Finding]:
    frozen = gc.get_freeze_count()  # before anybody looks at the heap, which thaws it
    # Most of the time is for the search for holders.
    soon = _clock() + (deadline - _clock()) / 3
    new = inventory.new_on(device.device, soon)
    cut_short = _clock() > soon
    if frozen and (hidden := _garbage(new, inventory, device.device, deadline)):
        return hidden
    searched = [storage for storage in new[:_MOST_TENSORS] if storage.bytes >= _SMALL * new[0].bytes]
    chains = find_chains_to_each(tensors_on(searched, deadline), deadline=deadline, base=base)
    books = allocations.recorded()
    found = [_held(storage, holders, device.device, books) for storage, holders in zip(searched, chains, strict=True)]
    groups = grouped(found)[:_MOST_FINDINGS]
    rest = new[len(searched) :]
    if rest and len(groups) == 1 and groups[0].holders and _alike(searched, rest):
        groups = [_with_rest(groups[0], rest)]
    weighed = list(_weighed(groups, device.stayed, cut_short=cut_short))
    if cut_short and not weighed:
        remarks.append(f"not all tensors on {device.device} were looked at: the search was cut short")
    return weighed


def _garbage(new: Sequence[LiveStorage], inventory: Inventory, device: str, deadline: float) -> list[Finding]:
    """Return what is garbage in truth, and was frozen, so that no collection could free it."""
    gc.collect()
    alive = {storage.identity for storage in inventory.new(deadline)}
    gone = [storage for storage in new if storage.identity not in alive]
    holder = "gc.freeze(), which hides a reference cycle from the collector; gc.unfreeze() and gc.collect() free it"
    return grouped(Finding(str(storage), storage.bytes, device, (holder,)) for storage in gone)


def _alike(searched: Sequence[LiveStorage], rest: Sequence[LiveStorage]) -> bool:
    kinds = {(storage.kind, storage.dtype) for storage in searched} | {("", "")}  # not every one is described
    return all((storage.kind, storage.dtype) in kinds for storage in rest)


def _with_rest(group: Finding, rest: Sequence[LiveStorage]) -> Finding:
    size = (group.bytes or 0) + sum(storage.bytes for storage in rest)
    return Finding(group.what, size, group.device, group.holders, group.stack, group.count + len(rest))


def _held(storage: LiveStorage, chains: Sequence[Chain], device: str, books: Segments) -> Finding:
    return Finding(
        what=str(storage),
        bytes=storage.bytes,
        device=device,
        holders=tuple(map(str, chains)),
        stack=allocations.stack_in(books, storage.address, storage.device),
    )


def _pools(device: str, inventory: Inventory, deadline: float, base: str | None) -> list[Finding]:
    """Return who keeps the private pools of CUDA graphs and the like, whose memory no tensor need be in."""
    pools = inventory.new_pools(device)[:_MOST_FINDINGS]
    found = find_chains_to_each([below.pool_users(pool) for pool in pools], deadline=deadline, base=base)
    return [
        Finding("private memory pool of torch's allocator", pool.reserved, device, tuple(map(str, chains)))
        for pool, chains in zip(pools, found, strict=True)
    ]


def _processes(device: DeviceVerdict, before: Reading, now: Reading, engines: Mapping[int, str]) -> list[Finding]:
    grown = {change.pid: change for change in device.processes}
    if device.device == HOST:
        ours = [use.pid for use in now.processes or () if use.ours]
        grown = {change.pid: change for change in changes(ours, before, now) if change.before == 0 and change.after}
    facts = processes.describe(grown, {pid: change.after for pid, change in grown.items()}, engines)
    # What the driver says of a process may be all that is known of it.
    texts = [str(fact if fact.running else grown[fact.pid]) for fact in facts]
    return [Finding(text, fact.bytes, device.device, itself=True) for text, fact in zip(texts, facts, strict=True)]


def _finished(started: float, findings: Sequence[Finding], remarks: Sequence[str] = ()) -> Diagnosis:
    seconds = _clock() - started
    return Diagnosis(tuple(findings), tuple(dict.fromkeys(remarks)), seconds, finished=seconds < LIMIT)
