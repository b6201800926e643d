"""Did bytes stay? Pure decisions over readings; who has the bytes is not asked here.

The first rule that shows a leak decides. To say that memory was released, a figure is needed that also sees
other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .expectation import Adjustment, Grants
from .reading import Reading, Snapshot
from .rules import SEE_PROCESSES, Case, DeviceVerdict, Outcome

# From the best to the worst that can be said of several devices together.
_RANK: tuple[Outcome, ...] = ("released", "foreign", "unknown", "leaked")

_AS_BEFORE = Adjustment()
_USUAL = Grants()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of all devices together: the worst that is said of one of them.

    Attributes:
        outcome: As for a device. A leak outweighs what could not be measured, which outweighs the rest.
        reason: The reason given for the first of the worst devices.
        stayed: Bytes that leaked, over all devices.
        devices: The verdict on each.
    """

    outcome: Outcome
    reason: str
    stayed: int
    devices: tuple[DeviceVerdict, ...]

    @property
    def leaks(self) -> tuple[DeviceVerdict, ...]:
        """The verdicts on the devices that leaked."""
        return tuple(device for device in self.devices if device.outcome == "leaked")


def judge(
    baseline: Reading,
    after: Reading,
    *,
    tolerance: int | None = None,
    expected: Adjustment = _AS_BEFORE,
    grants: Grants = _USUAL,
) -> DeviceVerdict:
    """Compare two readings of one device.

    Free blocks of the allocator and free heap pages should have been handed back before ``after`` was read.

    Args:
        baseline: Before the first fixture of the test.
        after: After everything was closed and had time to settle.
        tolerance: Bytes that may stay, for every figure; the defaults of this module if None.
        expected: What engines that live on, or that left, change.
        grants: What this process may keep.
    """
    case = Case(baseline, after, tolerance, expected, grants)
    applied = [verdict for verdict in case.rules() if verdict is not None]
    for verdict in applied:
        if verdict.outcome == "leaked":
            return verdict
    for verdict in applied:
        if verdict.outcome != "released":
            return verdict
    if not any(verdict.meter in SEE_PROCESSES for verdict in applied):
        only = "only torch's allocator could be read" if applied else "no figure could be read both times"
        return case.unknown(f"{only}, and it does not see other processes" if applied else only)
    return applied[0]


def judge_all(
    baseline: Snapshot,
    after: Snapshot,
    *,
    tolerance: int | None = None,
    expected: Mapping[str, Adjustment] | None = None,
    grants: Mapping[str, Grants] | None = None,
) -> Verdict:
    """Compare two snapshots, device by device, and combine.

    A device is found again by its identity rather than by its ordinal, which changes where CUDA comes up in
    between and orders the devices in its own way. A device that is in one snapshot alone cannot be called
    released.

    Args:
        baseline: Before the first fixture of the test.
        after: After everything was closed and had time to settle.
        tolerance: As for ``judge``.
        expected: By the device's name in ``after``.
        grants: By the device's name in ``after``.
    """
    earlier = {reading.identity: reading for reading in baseline.values() if reading.identity}
    verdicts, met = [], set()
    for name, reading in after.items():
        before = earlier.get(reading.identity) if reading.identity else None
        if before is None:
            before = baseline.get(name, Reading(device=name))
        met.add(before.device)
        verdicts.append(
            judge(
                before,
                reading,
                tolerance=tolerance,
                expected=(expected or {}).get(name, _AS_BEFORE),
                grants=(grants or {}).get(name, _USUAL),
            )
        )
    for name, reading in baseline.items():
        if name not in met:
            gone = Case(reading, Reading(device=name), tolerance, _AS_BEFORE, _USUAL)
            verdicts.append(gone.unknown("the device could not be read any more"))
    return combine(verdicts)


def combine(verdicts: Iterable[DeviceVerdict]) -> Verdict:
    """Return the worst of several verdicts; ``unknown`` if there is none, as nothing was measured."""
    devices = tuple(verdicts)
    if not devices:
        return Verdict(outcome="unknown", reason="no device was measured", stayed=0, devices=())
    worst = max(devices, key=lambda verdict: _RANK.index(verdict.outcome))
    stayed = sum(verdict.stayed for verdict in devices if verdict.outcome == "leaked")
    return Verdict(outcome=worst.outcome, reason=worst.reason, stayed=stayed, devices=devices)
