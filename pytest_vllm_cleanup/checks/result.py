"""What came out of one comparison of memory before and after a piece of work."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_vllm_cleanup.checks.charges import Charge
from pytest_vllm_cleanup.checks.debts import Debt
from pytest_vllm_cleanup.diagnosis.findings import Diagnosis
from pytest_vllm_cleanup.memory import DeviceVerdict, Snapshot, Verdict


@dataclass(frozen=True)
class Result:
    """What came out of a check.

    Attributes:
        verdict: released, leaked, foreign or unknown, with the deciding figures.
        baseline: readings before.
        after: the last readings.
        waited: how long it was waited for memory, in seconds.
        trend: "back", "flat", "falling" or "timeout".
        rate: bytes per second that were still coming back.
        stood: seconds for which the last figure had not changed when waiting ended.
        series: seconds since waiting began and bytes that were missing then, to the MiB; empty if nobody waited.
        abandoned: engines that were still alive, one phrase each.
        reason: why something could not be measured.
        owner: the fixtures of wider scope that are to blame, in words; "" if the test itself is.
        charges: who is to blame for how much.
        remains: what was still missing after abandoned engines had been closed, None if nothing was closed.
        debts: what tells how much of the leak is still there.
        diagnosis: who holds the memory; None if nobody looked.
        notes: further facts for the report, one sentence each.
    """

    verdict: Verdict
    baseline: Snapshot
    after: Snapshot
    waited: float
    trend: str
    rate: float = 0.0
    stood: float = 0.0
    series: tuple[tuple[float, int], ...] = ()
    abandoned: tuple[str, ...] = ()
    reason: str = ""
    owner: str = ""
    charges: tuple[Charge, ...] = ()
    remains: Verdict | None = None
    debts: tuple[Debt, ...] = ()
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def leaked(self) -> bool:
        """Whether memory stayed, or an engine that should be gone is still alive."""
        return self.verdict.outcome == "leaked" or bool(self.abandoned)

    @property
    def outcome(self) -> str:
        """The verdict in one word: released, leaked, foreign or unknown."""
        return "leaked" if self.leaked else self.verdict.outcome

    @property
    def left(self) -> tuple[DeviceVerdict, ...]:
        """The devices that are short of memory for good: of those that leaked, without what closing gave back."""
        return (self.verdict if self.remains is None else self.remains).leaks
