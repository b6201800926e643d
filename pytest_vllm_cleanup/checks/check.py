"""One comparison of memory before and after a piece of work. Knows nothing of pytest."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable

from pytest_vllm_cleanup.checks.charges import Charge, Mark, charges, levels
from pytest_vllm_cleanup.checks.ledger import MANY_MODULES, Ledger
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.diagnosis.tensors import Inventory
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.memory import HOST, Gauge, Settled, Snapshot, Verdict, judge_all, settle

# An in-process figure moves only if we move it; memory of a process that ends comes back late and in one step.
_FLAT_AFTER_IN_PROCESS = 0.4
_FLAT_AFTER_ELSEWHERE = 3.0
# How long it is waited where it is not known to be ours: a neighbour at work may never stand still.
_LATE = 10.0
_GRAIN = 2**20  # bytes; host memory moves by single pages all the time
_NOBODY = Verdict(outcome="released", reason="", stayed=0, devices=())
_IN_PROCESS_REASONS = ("allocator", "allocator cache", "below allocator")


class UnknownDeviceError(ValueError):
    """A check names a device that cannot be measured."""


class ReleaseCheck:
    """Takes the baseline when it is made, and compares when ``finish`` is called.

    Args:
        tolerance: bytes that may stay; None: the default of the meter.
        timeout: how long to wait for memory to come back, in seconds.
        devices: names of the devices that count, None for all.
        fixture_tolerance: the same as ``tolerance``, for fixtures of wider scope that end with the test.
        own: whether the test itself is checked; else only such fixtures are.
        gauge: what to measure with, None for the gauge of this process.
        ledger: the account of engines, None for the one of this process.

    Raises:
        UnknownDeviceError: one of ``devices`` is not visible; the text names those that are.
    """

    def __init__(
        self,
        *,
        tolerance: int | None = None,
        timeout: float = 60.0,
        devices: tuple[str, ...] | None = None,
        fixture_tolerance: int | None = None,
        own: bool = True,
        gauge: Gauge | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._tolerance = tolerance
        self._timeout = timeout
        self._devices = devices
        self._fixture_tolerance = fixture_tolerance
        self._own = own
        self._gauge = current_gauge() if gauge is None else gauge
        self._ledger = current_ledger() if ledger is None else ledger
        self.baseline = self._gauge.read()
        self._require(devices)
        self._inventory = Inventory.take(self.baseline)
        self._ledger.learn_contexts(self.baseline)
        self._live_at_start = self._ledger.live()
        self._newest_at_start = self._ledger.newest()
        self._granted_at_start = self._ledger.granted
        self._debts_at_start = self._ledger.debts()
        self._excuse = ""
        self._marks: list[Mark] = []
        self._charges: tuple[Charge, ...] = ()
        self._modules = len(sys.modules)
        self._threads_at_start = [weakref.ref(thread) for thread in threading.enumerate()]
        self._host_is_blurred = False

    def excuse(self, reason: str) -> None:
        """Have nothing said about the test, for a reason that the report gives."""
        self._excuse = reason

    def finish(self, abandoned: tuple[EngineHandle, ...] = (), let_go: Callable[[], None] | None = None) -> Result:
        """Compare. One reading if all is back; else garbage is collected, caches are flushed, and it is waited.

        Args:
            abandoned: engines that are still alive and should not be.
            let_go: gives up references that are no leak. Called only if memory has not come back.
        """
        if self._excuse:
            verdict = Verdict(outcome="unknown", reason=self._excuse, stayed=0, devices=())
            return Result(verdict, {}, {}, waited=0.0, trend="back", reason=self._excuse)
        self._account_for_imports()
        self._ledger.grant_residues()
        first = self._gauge.read()
        verdict = self._judge(first)
        if verdict.outcome == "leaked" and let_go is not None:
            let_go()
            self._ledger.grant_residues()
            first = self._gauge.read()
            verdict = self._judge(first)
        settled = Settled(first, 0.0, (), "back")
        if missing(verdict):
            gc.collect()
            self._ledger.grant_residues()  # of an engine that failed to start, and that a cycle kept until now
            flush_caches()
            settled = settle(
                self._gauge.read,
                lambda snapshot: not missing(self._judge(snapshot)),
                lambda snapshot: missing(self._judge(snapshot)) // _GRAIN,
                timeout=self._timeout if verdict.outcome == "leaked" else min(self._timeout, _LATE),
                flat_after=self._patience(verdict),
            )
            verdict = self._judge(settled.value)
        self._ledger.learn_contexts(settled.value)
        self._charges = tuple(charges(self._marks, verdict))
        return Result(
            verdict=verdict,
            baseline=self._counted(self.baseline, self._shown(verdict)),
            after=self._counted(settled.value, self._shown(verdict)),
            waited=settled.waited,
            trend=settled.trend,
            rate=settled.rate * _GRAIN,
            stood=settled.stood,
            series=tuple((at, missed * _GRAIN) for at, missed in settled.samples if missed is not None),
            abandoned=tuple(str(handle) for handle in abandoned),
            reason=self._reason(),
            charges=self._charges,
        )

    def before_fixture_ends(self, owner: str, number: int | None, let_go: Callable[[], None]) -> None:
        """Note what is missing before a fixture of wider scope is torn down, which may leak by itself.

        Args:
            owner: the fixture, in words.
            number: its number in the ledger, None if it has none.
            let_go: gives up references that are no leak. Called only if memory is missing.
        """
        verdict = self._judge_fixtures(self._gauge.read())
        if verdict.outcome == "leaked":
            let_go()
            gc.collect()
            flush_caches()
            verdict = self._judge_fixtures(self._gauge.read())
        self._marks.append(Mark(owner, number, levels(verdict)))

    def after_fixtures_ended(self) -> None:
        """Note what is missing where a fixture of wider scope ended before the test began, as for another parameter."""
        if self._marks and self._marks[-1].owner:
            self._marks.append(Mark("", None, levels(self._judge_fixtures(self._gauge.read()))))

    @property
    def inventory(self) -> Inventory:
        """The tensors that are not to blame: those of before the test and of what lives on."""
        leaked = {charge.number for charge in self._charges if charge.number is not None}
        return self._ledger.blameless(self._inventory, self._live_at_start, leaked)

    def remains(self) -> tuple[Verdict, Snapshot]:
        """Judge once more, and return the readings too."""
        gc.collect()
        flush_caches()
        snapshot = self._gauge.read()
        verdict = self._judge(snapshot)
        return verdict, self._counted(snapshot, self._shown(verdict))

    def _judge(self, snapshot: Snapshot) -> Verdict:
        verdict = self._compare(snapshot, self._tolerance, self._devices) if self._own else _NOBODY
        if verdict.outcome != "leaked" and any(mark.owner for mark in self._marks):
            wider = self._judge_fixtures(snapshot)
            if any(charge.owner for charge in charges(self._marks, wider)):
                return wider
        return verdict

    def _judge_fixtures(self, snapshot: Snapshot) -> Verdict:
        return self._compare(snapshot, self._fixture_tolerance, None)

    def _compare(self, snapshot: Snapshot, tolerance: int | None, devices: tuple[str, ...] | None) -> Verdict:
        return judge_all(
            self._counted(self.baseline, devices),
            self._counted(snapshot, devices),
            tolerance=tolerance,
            expected=self._ledger.expected(self._live_at_start, self._debts_at_start),
            grants=self._ledger.grants(snapshot, self._granted_at_start, self._live_at_start),
        )

    def _counted(self, snapshot: Snapshot, devices: tuple[str, ...] | None = None) -> Snapshot:
        return {
            name: reading
            for name, reading in snapshot.items()
            if (devices is None or name in devices) and not (name == HOST and self._host_is_blurred)
        }

    def _shown(self, verdict: Verdict) -> tuple[str, ...]:
        return tuple(device.device for device in verdict.devices)

    def _require(self, devices: tuple[str, ...] | None) -> None:
        missing = [name for name in devices or () if name not in self.baseline]
        if missing and self.baseline:
            raise UnknownDeviceError(
                f"device {', '.join(missing)} cannot be measured here; these can: {', '.join(sorted(self.baseline))}"
            )

    def _patience(self, verdict: Verdict) -> float:
        reasons = {device.reason for device in verdict.devices if device.may_come_back}
        if self._has_threads():
            return _FLAT_AFTER_ELSEWHERE  # one that finishes its work gives memory back late and in one step too
        if reasons <= set(_IN_PROCESS_REASONS) or (reasons == {"host"} and not self._has_processes()):
            return _FLAT_AFTER_IN_PROCESS
        return _FLAT_AFTER_ELSEWHERE

    def _has_processes(self) -> bool:
        return any(reading.children for reading in self._gauge.read().values())

    def _has_threads(self) -> bool:
        """Whether a thread runs that did not when the check began."""
        known = [reference() for reference in self._threads_at_start]
        return any(all(thread is not other for other in known) for thread in threading.enumerate())

    def _account_for_imports(self) -> None:
        imported = len(sys.modules) - self._modules
        if HOST not in self.baseline or imported < MANY_MODULES:
            return
        first_engine = self._ledger.first_since(self._newest_at_start)
        if first_engine is None:
            self._host_is_blurred = True  # imports and leaks look the same
        else:
            self._ledger.grant_imports(self.baseline, first_engine)

    def _reason(self) -> str:
        if self._host_is_blurred:
            return (
                f"{len(sys.modules) - self._modules} modules were imported meanwhile, and their host memory looks "
                "like a leak; import torch and vllm at the top of the test module"
            )
        return self._gauge.reason


def missing(verdict: Verdict) -> int:
    """Return the bytes that may still come back, also where they can be those of a process that has just ended."""
    return sum(device.stayed for device in verdict.devices if device.may_come_back)


_ledgers: dict[int, Ledger] = {}


def current_ledger() -> Ledger:
    """Return the account of this process's engines; it listens from the first call on."""
    gauge = current_gauge()
    ledger = _ledgers.get(id(gauge))
    if ledger is None:
        ledger = _ledgers[id(gauge)] = Ledger(gauge)
        registry.listeners.append(ledger)
        for handle in registry.handles():
            if handle.state is State.LIVE:
                ledger.adopt(handle)
    return ledger


def flush_caches() -> None:
    """Hand back what torch's allocator keeps free in this process, if CUDA is up in it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        if not registry.siblings(None):
            # Made by the first matrix product (32 MiB on Hopper) and no leak; graphs of a live engine may use it.
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.ipc_collect()  # what was sent to a process that has ended
        torch.cuda.empty_cache()
