"""Who is to blame for how much: the test, or the fixtures of wider scope that ended with it. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_vllm_cleanup.memory import Verdict

Levels = Mapping[tuple[str, str], int]
"""Bytes that are missing, by device and by the figure that shows it."""


@dataclass(frozen=True)
class Mark:
    """A moment at which memory was read, because what happens from then on is somebody else's.

    Attributes:
        owner: the fixture that is torn down next, in words; "" for the test itself.
        number: the fixture's number in the ledger, None if it has none.
        missing: what was missing at that moment.
    """

    owner: str
    number: int | None
    missing: Levels


@dataclass(frozen=True)
class Charge:
    """What one of them has to answer for.

    Attributes:
        owner: the fixture, in words; "" for the test itself.
        number: the fixture's number in the ledger, None if it has none.
        device: name of the device.
        bytes: how much.
    """

    owner: str
    number: int | None
    device: str
    bytes: int


def levels(verdict: Verdict) -> Levels:
    """Return what is missing according to a verdict."""
    return {(device.device, device.meter): device.stayed for device in verdict.devices}


def charges(marks: Sequence[Mark], verdict: Verdict) -> list[Charge]:
    """Divide what leaked among the test and the fixtures that ended, in the order in which it went missing.

    Memory that was missing at a mark and has come back since was late, and no leak. Shares within a device's tolerance
    are nobody's, unless there are only such shares: then the biggest one counts.

    Args:
        marks: the moments between which something ended, oldest first.
        verdict: the verdict after all of it.
    """
    found: list[Charge] = []
    for device in verdict.leaks:
        key = (device.device, device.meter)
        missing = [*(mark.missing.get(key, 0) for mark in marks), device.stayed]
        for place in reversed(range(len(marks))):
            missing[place] = min(missing[place], missing[place + 1])
        shares: dict[tuple[str, int | None], int] = {}
        owners = [("", None), *((mark.owner, mark.number) for mark in marks)]
        for owner, before, after in zip(owners, [0, *missing], missing, strict=False):
            shares[owner] = shares.get(owner, 0) + after - before
        much = {owner: share for owner, share in shares.items() if share > device.tolerance}
        biggest = max(shares, key=lambda owner: shares[owner])
        found += [Charge(*owner, device.device, share) for owner, share in (much or {biggest: shares[biggest]}).items()]
    return found
