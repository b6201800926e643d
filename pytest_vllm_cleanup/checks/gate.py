"""What stands between leaks that stay and the engines that come after them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from pytest_vllm_cleanup.checks.check import current_ledger, flush_caches
from pytest_vllm_cleanup.checks.ledger import Ledger
from pytest_vllm_cleanup.checks.quarantine import Leak, Quarantine, outstanding_of
from pytest_vllm_cleanup.checks.references import chain
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.engines.errors import DeviceQuarantinedError
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.needs import shares_of
from pytest_vllm_cleanup.engines.registry import EngineHandle, State, registry
from pytest_vllm_cleanup.memory import Gauge, Reading, Snapshot

_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "ModelDoesNotFitError"})


class Gate:
    """Remembers the leaks that stay, refuses engines that cannot start because of them, and names them when one fails.

    Args:
        refuse: whether engines are refused; else leaks are only remembered.
        gauge: what to measure with, None for the gauge of this process.
        ledger: the account of engines, None for the one of this process.
    """

    def __init__(self, *, refuse: bool, gauge: Gauge | None = None, ledger: Ledger | None = None) -> None:
        self.quarantine = Quarantine()
        self._refuse = refuse
        self._gauge = gauge
        self._ledger = ledger
        self._failed: set[str] = set()
        self._at_start: Snapshot = {}

    def install(self) -> None:
        """Ask this gate before every engine of this process from now on."""
        registry.gates.append(self.before_start)
        registry.listeners.append(self)

    def uninstall(self) -> None:
        """Undo ``install``."""
        registry.gates.remove(self.before_start)
        registry.listeners.remove(self)

    def begin(self, baseline: Snapshot | None = None) -> None:
        """Note what is in use before a test, and forget the leaks that have come back.

        Args:
            baseline: readings of now, None to take them if there is a reason.
        """
        self._at_start = self.review(baseline)

    def review(self, snapshot: Snapshot | None = None) -> Snapshot:
        """Forget the leaks that have come back.

        Args:
            snapshot: readings of now, None to take them.

        Returns:
            the readings; empty if there was nothing to look at.
        """
        if not self.quarantine.outstanding:
            return {}
        snapshot = self._read() if snapshot is None else snapshot
        self.quarantine.review(snapshot, self._account().expected)
        return snapshot

    def leaked(self, nodeid: str, result: Result) -> list[Leak]:
        """Remember a leak that is still there after everything was closed, reaped and waited for.

        Args:
            nodeid: the test that was running.
            result: the completed result.

        Returns:
            what is new and stays, one a device. Later leaks are measured with these in their baselines.
        """
        known = list(self.quarantine.outstanding)
        live, now = self._account().live(), self._read()
        for device in result.left:
            leak = Leak(
                owner=result.owner or f"test {nodeid}",
                nodeid=nodeid,
                device=device.device,
                bytes=device.stayed,
                holder=result.diagnosis.holder if result.diagnosis is not None else "",
                reason=device.reason,
            )
            reading = now.get(device.device, Reading(device=device.device))
            held = [debt.held for debt in result.debts if debt.device == device.device]
            self.quarantine.add(outstanding_of(device, reading, leak, live, held))
        self.review(now)
        return [entry.leak for entry in self.quarantine.outstanding if entry not in known]

    def explain(self, nodeid: str, error: BaseException | None) -> str:
        """Return which leaks can have failed a phase of a test, "" if none can.

        Args:
            nodeid: the test.
            error: what failed, None if nothing did.
        """
        if error is None or not self.quarantine.outstanding:
            return ""
        kinds = {kind.__name__ for linked in chain(error) for kind in type(linked).__mro__}
        if DeviceQuarantinedError.__name__ in kinds:
            return ""  # it says so itself
        if nodeid not in self._failed and kinds.isdisjoint(_OUT_OF_MEMORY):
            return ""
        self.review()
        return "\n".join(self.quarantine.notes())

    def before_start(self, _handle: EngineHandle, config: Any) -> None:
        """Refuse an engine that cannot start because of a leak.

        Raises:
            DeviceQuarantinedError: the text names what is asked for, what is free, and who leaked what.
        """
        if not self._refuse or (need := shares_of(config)) == {}:
            return
        if self._refusal(need) is None:
            return
        gc.collect()  # as vLLM does before it looks
        flush_caches()
        refusal = self._refusal(need)
        if refusal is not None:
            raise DeviceQuarantinedError(refusal)

    def _refusal(self, need: Mapping[str, float]) -> str | None:
        now = self.review()
        grown = {
            name: reading.used - before.used
            for name, reading in now.items()
            if (before := self._at_start.get(name)) and reading.used is not None and before.used is not None
        }
        return self.quarantine.refusal(need, now, grown)

    def before_build(self, handle: EngineHandle) -> None:
        """Do nothing; as a listener."""

    def after_build(self, handle: EngineHandle) -> None:
        """Remember in which test an engine failed to start."""
        if handle.state is State.FAILED:
            self._failed.add(handle.owner.node)

    def after_close(self, handle: EngineHandle) -> None:
        """Do nothing; as a listener."""

    def _read(self) -> Snapshot:
        return (current_gauge() if self._gauge is None else self._gauge).read()

    def _account(self) -> Ledger:
        return current_ledger() if self._ledger is None else self._ledger
