"""Fixtures of class, module, package and session scope: whose they are, what they hold, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pytest_vllm_cleanup.checks.check import current_ledger
from pytest_vllm_cleanup.engines.registry import Owner
from pytest_vllm_cleanup.guard import guarded


@dataclass
class WiderFixture:
    """One fixture of wider scope that is set up.

    Attributes:
        owner: the fixture, as the owner of engines.
        checked: whether it was set up for a checked test, so that it has to give its memory back when it ends.
        number: its number in the ledger, None if it was not measured.
    """

    owner: Owner
    checked: bool
    number: int | None = None


class WiderFixtures:
    """Knows them: what they hold is no leak of a test that uses them.

    Args:
        measured: whether their memory is measured.
    """

    def __init__(self, *, measured: bool) -> None:
        self.ended: set[Owner] = set()
        self._measured = measured
        self._fixtures: dict[object, WiderFixture] = {}  # by pytest's definition of them

    def get(self, fixturedef: pytest.FixtureDef[object]) -> WiderFixture | None:
        """Return what is known of a fixture, None if it is of function scope or not set up."""
        return self._fixtures.get(fixturedef)

    @contextmanager
    def being_set_up(self, fixturedef: pytest.FixtureDef[object], owner: Owner, *, checked: bool) -> Iterator[None]:
        """Charge to a fixture what its setup takes, unless it is of function scope.

        Args:
            fixturedef: pytest's definition of it.
            owner: the fixture, as the owner of engines.
            checked: whether it is set up for a checked test.
        """
        if fixturedef.scope == "function":
            yield
            return
        fixture = self._fixtures[fixturedef] = WiderFixture(owner, checked)
        set_up = None
        if self._measured:
            with guarded(f"measuring before fixture {fixturedef.argname}"):
                set_up = current_ledger().account_fixture()
        try:
            yield
        finally:  # also one that fails in its setup may leave something
            if set_up is not None:
                with guarded(f"measuring after fixture {fixturedef.argname}"):
                    fixture.number = set_up()

    def end(self, fixturedef: pytest.FixtureDef[object]) -> None:
        """Note that a fixture has been torn down."""
        fixture = self._fixtures.pop(fixturedef, None)
        if fixture is None:
            return
        self.ended.add(fixture.owner)
        if fixture.number is not None:
            with guarded(f"accounting for fixture {fixturedef.argname}"):
                current_ledger().end_fixture(fixture.number)
