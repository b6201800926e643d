"""Whose turn it is on devices that several processes use: together, or one alone. Pure decisions over a waiting list.

A test runs on the device of its worker together with tests of other workers (shared), or on several devices alone
(exclusive). Nothing is ever held while waiting for more: a claim names all its devices and gets all of them or none.

A claim is ``waiting`` with a ticket, ``running`` while its test runs, or ``resting`` when its test is over and an
engine of wider scope is still on the device. A claim has to wait

- for those that run and conflict: they have a device in common, and one of the two is exclusive;
- for those that rest and conflict, unless the rester itself waits for its next test;
- for those that wait with an earlier ticket and conflict, unless the claim is shared, and for devices on which its own
  worker rests.

*No deadlock.* Of those that wait, let T have the earliest ticket. It waits for no other waiting claim, so only for
tests that run and for workers that rest without waiting. The first end. The second start their next test or end; if
that test has to wait, they wait, and no longer stand in T's way. (Then T meets an idle engine: two workers that rest,
each of which needs the other's device, can only go on so.)

*No starvation.* Who comes later than T and conflicts with it stands behind it, but for workers with an engine of wider
scope on the device: letting them wait would leave their engine in T's way. They pass until that engine's fixture ends,
which is after finitely many tests. So T's turn comes, and with it that of each next one.

*After a crash* the claims of processes that have ended are dropped by whoever looks next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["waiting", "running", "resting"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What one process has or wants.

    Attributes:
        pid: the process.
        started: when it started, which tells it from a later one of that number.
        ticket: its place in the order of those that wait.
        state: see above.
        devices: the devices that it wants or has.
        exclusive: whether it wants or has them alone.
        rests_on: the devices on which its engines of wider scope are.
    """

    pid: int
    started: int
    ticket: int
    state: State
    devices: frozenset[str]
    exclusive: bool = False
    rests_on: frozenset[str] = frozenset()

    @property
    def process(self) -> tuple[int, int]:
        """Which process it is of."""
        return self.pid, self.started


def blockers(claim: Claim, claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims of others that a waiting claim has to wait for; none if it is its turn."""
    return [other for other in claims if other.process != claim.process and _blocks(other, claim)]


def _blocks(other: Claim, claim: Claim) -> bool:
    conflict = bool(other.devices & claim.devices) and (other.exclusive or claim.exclusive)
    if other.state == "running":
        return conflict
    if other.state == "resting":
        return claim.exclusive and bool(other.rests_on & claim.devices)
    returns = not claim.exclusive and claim.devices <= claim.rests_on
    return conflict and other.ticket < claim.ticket and not returns


def enter(claims: list[Claim], mine: Claim) -> list[Claim]:
    """Return the list with a new claim in the place of the process's last one, at the end of the queue."""
    rests_on = next((claim.rests_on for claim in claims if claim.process == mine.process), frozenset[str]())
    others = [claim for claim in claims if claim.process != mine.process]
    ticket = 1 + max((claim.ticket for claim in claims), default=0)
    return [*others, replace(mine, ticket=ticket, state="waiting", rests_on=rests_on)]


def advance(claims: list[Claim], process: tuple[int, int]) -> tuple[list[Claim], list[Claim]]:
    """Let a waiting process run if it is its turn.

    Returns:
        the list, and what it still waits for; nothing if it runs now.
    """
    mine = next(claim for claim in claims if claim.process == process)
    waits_for = blockers(mine, claims)
    if waits_for:
        return claims, waits_for
    return [replace(mine, state="running") if claim is mine else claim for claim in claims], []


def leave(claims: list[Claim], process: tuple[int, int], rests_on: frozenset[str]) -> list[Claim]:
    """Return the list after a process's test; it stays on devices where it has left an engine of wider scope."""
    found = []
    for claim in claims:
        if claim.process != process:
            found.append(claim)
        elif rests_on:
            found.append(replace(claim, state="resting", devices=rests_on, exclusive=False, rests_on=rests_on))
    return found
