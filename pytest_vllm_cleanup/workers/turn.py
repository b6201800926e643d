"""Tests with ``@pytest.mark.gpus(n)``: skipped where there are fewer, and alone on the devices that they get."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from pytest_vllm_cleanup import markers
from pytest_vllm_cleanup.devices import VisibleDevice, assign
from pytest_vllm_cleanup.devices.board import Board
from pytest_vllm_cleanup.devices.offered import Offer, Offered, offer
from pytest_vllm_cleanup.devices.sharing import SHARERS
from pytest_vllm_cleanup.engines import measure
from pytest_vllm_cleanup.engines.registry import registry
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.workers.orders import Orders, orders_of

NAME = "vllm_cleanup_turn"


def activate(config: pytest.Config) -> Turns:
    """Return what gives devices to tests, registered if it was not yet."""
    turns = config.pluginmanager.get_plugin(NAME)
    if not isinstance(turns, Turns):
        turns = Turns(config)
        config.pluginmanager.register(turns, NAME)
    return turns


class Turns:
    """Knows which devices a test has.

    In a worker that was given a device, each test waits for its turn there if some test of the run takes more devices
    than its worker's own. Elsewhere a test has what is visible.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._orders = orders_of(config)
        self._offer: Offer | None = None if self._orders is None else self._orders.offer
        self._board: Board | None = None
        self._rests_on: frozenset[str] = frozenset()

    def given(self, item: pytest.Item) -> tuple[VisibleDevice, ...]:
        """Return the devices of a test, numbered as its engines number them."""
        wanted = markers.gpus_of(item)
        if wanted is None and self._orders is None:
            devices = self._offered().devices
        else:
            devices = self._devices(wanted or 1) or ()
        return tuple(VisibleDevice(ordinal, device.uuid) for ordinal, device in enumerate(devices))

    def watch(self, items: Sequence[pytest.Item]) -> None:
        """Skip tests that need more devices than there are. Have all wait if one takes devices of several workers."""
        for item in items:
            wanted = _wanted(item)
            if item.get_closest_marker(markers.GPUS) is not None and self._devices(wanted) is None:
                item.add_marker(pytest.mark.skip(reason=_too_few(wanted, self._offered())))
        if self._orders is not None and any(_wanted(item) > 1 for item in items):
            with guarded("looking for the waiting list of devices"):
                self._board = Board()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test whose marker is wrong."""
        problem = ""
        try:
            markers.gpus_of(item)
        except markers.MarkerError as error:
            problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Wait for the test's devices, and show them to it and to its engines until it is over."""
        with ExitStack() as held:
            with guarded(f"giving devices to {item.nodeid}"):
                if self._orders is not None and (devices := self._devices(_wanted(item))) is not None:
                    self._enter(held, self._orders, devices)
            return (yield)

    def _enter(self, held: ExitStack, orders: Orders, devices: tuple[Offered, ...]) -> None:
        several = len(devices) > 1
        if self._board is not None:
            with guarded("waiting for a turn on the devices of this test"):
                self._board.wait((device.key for device in devices), exclusive=several)
                held.callback(self._leave, self._board, devices)
        if several:
            held.enter_context(_shown({**orders.offer.environment(devices), SHARERS: "1"}))
            with guarded("measuring several devices"):
                held.enter_context(measure.seeing(os.environ))

    def _leave(self, board: Board, devices: tuple[Offered, ...]) -> None:
        with guarded("giving devices back"):
            lives = bool(registry.others(None))
            used = self._rests_on | {device.key for device in devices}
            self._rests_on = frozenset(used) if lives else frozenset()
            board.leave(self._rests_on)

    def _devices(self, wanted: int) -> tuple[Offered, ...] | None:
        offered = self._offered()
        if self._orders is not None:
            return assign.widened(offered.devices, self._orders.rank, wanted)
        return None if wanted > len(offered.devices) else offered.devices[:wanted]

    def _offered(self) -> Offer:
        if self._offer is None:
            from pytest_vllm_cleanup.devices import inventory

            found = inventory.take()
            self._offer = offer(os.environ, found.cards, found.reason)
        return self._offer


def _wanted(item: pytest.Item) -> int:
    try:
        return markers.gpus_of(item) or 1
    except markers.MarkerError:  # said in its setup
        return 1


def _too_few(wanted: int, offered: Offer) -> str:
    needs = f"needs {wanted} GPUs" if wanted > 1 else "needs a GPU"
    if not offered.devices:
        return f"{needs}, and none is visible: {offered.reason}"
    names = ",".join(device.text for device in offered.devices)
    verb = "is" if len(offered.devices) == 1 else "are"
    return f"{needs}, and {len(offered.devices)} {verb} visible ({offered.variables[0]}={names})"


@contextmanager
def _shown(variables: Mapping[str, str]) -> Iterator[None]:
    environ = os.environ  # a test may have put another one in its place when it is over
    before: dict[str, str | None] = {name: environ.get(name) for name in variables}
    environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
