"""What engines and fixtures that live on, or that left, change in the memory that a test may be charged with."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from types import MappingProxyType
from typing import Any

from pytest_vllm_cleanup.checks.debts import Debt
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.engines.registry import EngineHandle, State
from pytest_vllm_cleanup.memory import HOST, Adjustment, Gauge, Grants, Reading, Snapshot
from pytest_vllm_cleanup.memory.expectation import context_bytes
from pytest_vllm_cleanup.memory.tenants import Tenants
from pytest_vllm_cleanup.memory.units import MIB

# On vLLM's CPU platform an engine's memory is host memory, and so are the modules and compilers that the first engine
# of its kind loads and that stay loaded. They are granted as measured, once, up to this limit.
FIRST_ENGINE_LIMIT = 384 * MIB
# A live engine grows when it first works: cuBLAS workspaces (32 MiB on Hopper), sampler buffers; in a child process
# loaded kernels too. Nothing tells that growth from a leak of the test that made it work.
WORKING_ALLOWANCE = 64 * MIB
WORKING_ALLOWANCE_ELSEWHERE = 256 * MIB
_UNKNOWN = Adjustment(allocated=1, children=1, host=1)
# Importing torch or vLLM takes hundreds of MiB of host memory for good, and some thousand modules.
MANY_MODULES = 100
_NONE: Mapping[Debt, int] = MappingProxyType({})


@dataclass
class Entry:
    """What the ledger knows of one engine, or of one fixture of wider scope.

    Attributes:
        owner_is_test: whether the engine has to be gone when the test that made it is over.
        before: readings before it was built.
        footprint: what building it added, by device; empty if nobody looked.
        live: whether it is still open.
        is_engine: whether it may grow by working.
        remains: weak references to the parts of one whose constructor raised; the exception's frames hold them.
        known: the tensors that there were before it was built, until it is.
        made: the tensors that building it added; None if nobody looked, or it is a test's.
    """

    owner_is_test: bool
    before: Snapshot
    footprint: dict[str, Adjustment] = field(default_factory=dict)
    live: bool = True
    is_engine: bool = True
    remains: tuple[weakref.ref[Any], ...] = ()
    known: Inventory | None = None
    made: Inventory | None = None


class Ledger:
    """Listens to the registry and keeps account of every engine's memory."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._entries: dict[int, Entry] = {}
        self._kinds_seen: set[str] = set()
        self._ungranted: list[Entry] = []
        self._granted = 0
        self._contexts: dict[str, int] = {}
        self._debts: list[Debt] = []

    @property
    def granted(self) -> int:
        """Bytes of host memory granted so far in this process for first engines and imports."""
        return self._granted

    def adopt(self, handle: EngineHandle) -> None:
        """Take in an engine that was built before anybody kept account."""
        self._entries[handle.number] = Entry(handle.owner.is_test, {})

    def before_build(self, handle: EngineHandle) -> None:
        """Read what is in use before an engine is built."""
        before = self._gauge.read()
        known = None if handle.owner.is_test else Inventory.take(before)
        self._entries[handle.number] = Entry(handle.owner.is_test, before, known=known)

    def after_build(self, handle: EngineHandle) -> None:
        """Charge to the engine what building it has added."""
        entry = self._entries.get(handle.number)
        if entry is None:
            return
        after = self._gauge.read()
        if handle.state is State.FAILED:
            entry.live = False
            entry.remains = tuple(handle.parts.values())
        if entry.known is not None:
            entry.made, entry.known = Inventory.take(after).without(entry.known), None
        entry.footprint = {
            name: footprint(entry.before.get(name, Reading(device=name)), reading) for name, reading in after.items()
        }

    def after_close(self, handle: EngineHandle) -> None:
        """Note that an engine is gone, and what the first of its kind has left in host memory for good."""
        entry = self._entries.get(handle.number)
        if entry is None:
            return
        entry.live = False
        kind = "child processes" if handle.in_process is False else "compiled" if handle.traces.hooks else "eager"
        if kind not in self._kinds_seen:
            self._kinds_seen.add(kind)
            if handle.report is not None and (entry.remains or not handle.report.alive):
                self._ungranted.append(entry)
                self.grant_residues()

    def account_fixture(self) -> Callable[[], int]:
        """Read what is in use before a fixture of wider scope is set up.

        Returns:
            to be called when it is set up: charges to it what that added beside engines, and returns its number, which
            is negative.
        """
        before, known, modules = self._gauge.read(), frozenset(self._entries), len(sys.modules)
        inventory = Inventory.take(before)

        def is_set_up() -> int:
            footprints, now = {}, self._gauge.read()
            for name, after in now.items():
                if name == HOST and len(sys.modules) - modules >= MANY_MODULES:
                    continue  # modules stay when the fixture goes
                inside = [
                    e.footprint.get(name, Adjustment()) for n, e in self._entries.items() if n not in known and e.live
                ]
                footprints[name] = _beside(footprint(before.get(name, Reading(device=name)), after), inside)
            number = min((0, *self._entries)) - 1
            made = Inventory.take(now).without(inventory)
            self._entries[number] = Entry(False, before, footprints, is_engine=False, made=made)
            return number

        return is_set_up

    def end_fixture(self, number: int) -> None:
        """Note that a fixture of wider scope has been torn down."""
        self._entries[number].live = False

    def blameless(self, inventory: Inventory, live_at_start: frozenset[int], leaked: Collection[int] = ()) -> Inventory:
        """Return the tensors that are not to blame for a leak.

        What fixtures and engines of wider scope made while they were set up is theirs, unless they are to blame.

        Args:
            inventory: the tensors that were there at the baseline.
            live_at_start: the engines and fixtures that were open then.
            leaked: the numbers of those that are to blame.
        """
        for number in leaked:
            if (made := self._entries[number].made) is not None:
                inventory = inventory.without(made)
        for number, entry in self._entries.items():
            # One that leaked may have had others set up while it was.
            if entry.made is not None and entry.live and (leaked or number not in live_at_start):
                inventory = inventory.plus(entry.made)
        return inventory

    def grant_residues(self) -> None:
        """Grant what the first engines left; of one that failed to start as soon as nobody holds its exception."""
        for entry in list(self._ungranted):
            if all(part() is None for part in entry.remains):
                self._ungranted.remove(entry)
                self._grant_residue(entry)

    def grant_imports(self, baseline: Snapshot, first: int) -> None:
        """Grant what imports took between a baseline and the first engine after it."""
        entry = self._entries.get(first)
        if entry is not None:
            self._granted += max(0, _host_bytes(entry.before) - _host_bytes(baseline))

    def live(self) -> frozenset[int]:
        """Return the numbers of the engines and fixtures that are open now."""
        return frozenset(number for number, entry in self._entries.items() if entry.live)

    def first_since(self, number: int) -> int | None:
        """Return the first engine with a larger number, None if there is none."""
        return min((known for known in self._entries if known > number), default=None)

    def newest(self) -> int:
        """Return the number of the newest engine, 0 if there has been none."""
        return max((0, *self._entries))

    def owe(self, debts: Iterable[Debt]) -> None:
        """Note what an earlier test has leaked: where it comes back later, it makes room for no other leak."""
        for debt in debts:
            if not any(map(debt.overlaps, self._debts)):
                self._debts.append(debt)

    def debts(self) -> dict[Debt, int]:
        """Return what earlier leaks still hold, in bytes; those that have come back are forgotten."""
        held = {debt: debt.held() for debt in self._debts}
        self._debts = [debt for debt, size in held.items() if size]
        return {debt: size for debt, size in held.items() if size}

    def expected(
        self, live_at_start: frozenset[int], debts_at_start: Mapping[Debt, int] = _NONE
    ) -> dict[str, Adjustment]:
        """Return by how much each device may differ from a baseline, for what has a wider scope or leaked before.

        Args:
            live_at_start: the engines and fixtures that were open when the baseline was taken.
            debts_at_start: what earlier leaks held then.
        """
        total: dict[str, Adjustment] = {}
        for number, entry in self._entries.items():
            if entry.live and not entry.owner_is_test and number not in live_at_start:
                _add(total, entry.footprint, 1)
            elif not entry.live and number in live_at_start:
                _add(total, entry.footprint, -1)
        for debt, held in debts_at_start.items():
            if back := held - debt.held():
                _add(total, {debt.device: debt.adjustment(back)}, -1)
        return total

    def grants(
        self, snapshot: Snapshot, granted_at_start: int, live_at_start: frozenset[int] = frozenset()
    ) -> dict[str, Grants]:
        """Return what this process may keep on each device.

        Args:
            snapshot: readings after the test.
            granted_at_start: what was granted when the baseline was taken, in bytes.
            live_at_start: what was open then; also an engine that an unchecked test left may work and grow.
        """
        working: dict[str, Adjustment] = {}
        for number, entry in self._entries.items():
            if entry.is_engine and entry.live and (number in live_at_start or not entry.owner_is_test):
                footprints = entry.footprint or dict.fromkeys(snapshot, _UNKNOWN)
                _add(working, {name: _working(adjustment) for name, adjustment in footprints.items()}, 1)
        return {
            name: Grants(
                context=self._contexts.get(name),
                host=self._granted - granted_at_start if name == HOST else 0,
                working=working.get(name, Adjustment()),
            )
            for name in snapshot
        }

    def learn_contexts(self, snapshot: Snapshot) -> None:
        """Remember what this process's context takes on each device, as measured at its first use."""
        for name, reading in snapshot.items():
            size = context_bytes(reading)
            if size and name not in self._contexts:
                self._contexts[name] = size

    def _grant_residue(self, entry: Entry) -> None:
        after = self._gauge.read()
        if HOST in after:
            self._granted += min(max(0, _host_bytes(after) - _host_bytes(entry.before)), FIRST_ENGINE_LIMIT)


def footprint(before: Reading, after: Reading) -> Adjustment:
    """Return what was added between two readings of one device, figure by figure."""
    if after.device == HOST:
        return Adjustment(host=(after.used or 0) - (before.used or 0))
    below = 0
    # The context that comes with the first engine stays when the engine goes: it is not part of the engine.
    if (earlier := context_bytes(before)) and (later := context_bytes(after)):
        below = later - earlier
    allocated = (after.allocated or 0) - (before.allocated or 0)
    children = 0
    if after.children is not None:
        children = after.children - (before.children or 0)
    elif before.reserved is None and after.reserved is not None and allocated > 0:
        pass  # processes are hidden, and CUDA came up in this one meanwhile: what is no tensor may be its context
    elif after.used is not None and before.used is not None:
        # Hidden (in containers): what is neither this process's allocator's, nor surely a stranger's, is the engine's.
        theirs = Tenants(before, after).held()
        children = after.used - theirs[1] - (before.used - theirs[0]) - ((after.reserved or 0) - (before.reserved or 0))
    return Adjustment(allocated=allocated, children=children, below=below)


def _beside(total: Adjustment, inside: list[Adjustment]) -> Adjustment:
    """Return what is left of a footprint without others; what setting up has freed is no debt."""
    return Adjustment(
        *(max(0, whole - sum(parts)) for whole, *parts in zip(*map(astuple, (total, *inside)), strict=True))
    )


def _host_bytes(snapshot: Snapshot) -> int:
    reading = snapshot.get(HOST)
    return 0 if reading is None or reading.used is None else reading.used


def _working(adjustment: Adjustment) -> Adjustment:
    return Adjustment(
        allocated=WORKING_ALLOWANCE if adjustment.allocated > 0 else 0,
        children=WORKING_ALLOWANCE_ELSEWHERE if adjustment.children > 0 else 0,
        host=WORKING_ALLOWANCE_ELSEWHERE if adjustment.host > 0 else 0,
    )


def _add(total: dict[str, Adjustment], footprints: dict[str, Adjustment], sign: int) -> None:
    for name, adjustment in footprints.items():
        signed = Adjustment(*(sign * figure for figure in astuple(adjustment)))
        total[name] = total.get(name, Adjustment()).plus(signed)
