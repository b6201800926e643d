"""The controller's part: it gives each worker a device before anything is loaded in it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_vllm_cleanup.devices import assign
from pytest_vllm_cleanup.devices.offered import Offer, offer
from pytest_vllm_cleanup.devices.sharing import SHARERS
from pytest_vllm_cleanup.devices.visible import NvmlDevice
from pytest_vllm_cleanup.guard import warn
from pytest_vllm_cleanup.report.carried import SECTION
from pytest_vllm_cleanup.workers.orders import KEY, PREDECESSOR, Orders
from pytest_vllm_cleanup.workers.worker import PROBLEM

NAME = "vllm_cleanup_workers"
_ANSWER = 60.0  # seconds that a worker's process has to say what it finds

# Runs in the worker's process while that is nothing but an interpreter. What is imported for it goes again, since
# pytest wants to be the one that imports its plugins.
_ARRIVE = """
import os, sys
path = channel.receive()
before, known = list(sys.path), set(sys.modules)
if path is not None:
    sys.path[:] = path
try:
    from pytest_vllm_cleanup.devices.arrival import look
    facts = look()
finally:
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "pytest_vllm_cleanup":
            del sys.modules[name]
channel.send(facts)
os.environ.update(channel.receive())
"""


@dataclass
class _Host:
    """Workers that share out the same devices.

    Attributes:
        workers: how many have been placed.
        addresses: under which addresses they run.
    """

    workers: int = 0
    addresses: set[tuple[str, ...]] = field(default_factory=set)


@dataclass
class _Place:
    """What outlives a worker: whoever replaces it gets its rank.

    Attributes:
        spec: pytest-xdist's description of the worker, which its replacement has too.
        host: what tells the devices that it shares out from others.
        rank: its number among those that share them out.
        process: number and start of the process that has the place.
        orders: what it was told, None where there was no device to give.
    """

    spec: Any
    host: tuple[Any, ...]
    rank: int
    process: tuple[int, int] | None = None
    orders: Orders | None = None


class Controller:
    """Hands out devices, host by host: a host is a machine or container together with the devices visible there."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._addresses: Counter[tuple[str, ...]] = Counter()
        self._hosts: dict[tuple[Any, ...], _Host] = {}
        self._places: list[_Place] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Any) -> None:
        """Count the workers of each address, so that the first one knows how many there will be."""
        self._addresses = Counter(map(_address, specs))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker its device, in the environment of its process."""
        spec = node.gateway.spec
        channel = node.gateway.remote_exec(_ARRIVE)
        try:
            channel.send(list(sys.path) if spec.popen else None)
            facts = channel.receive(_ANSWER)
            place = self._place(spec, facts)
            orders = place.orders = self._orders(node, place, facts)
            if orders is None:
                channel.send({})
            else:
                node.workerinput[KEY] = orders.as_data()
                if place.process is not None:
                    node.workerinput[PREDECESSOR] = list(place.process)
                channel.send({**orders.offer.environment([orders.home]), SHARERS: str(orders.sharers)})
            channel.waitclose(_ANSWER)
        except (channel.RemoteError, channel.TimeoutError, EOFError) as problem:
            reason = str(problem).strip().splitlines()[-1:] or [type(problem).__name__]
            raise pytest.UsageError(f"worker {node.gateway.id} cannot be given a GPU: {reason[0]}") from None
        except pytest.UsageError:
            raise
        except Exception as problem:
            channel.close()
            warn(f"giving a GPU to worker {node.gateway.id}", problem)
        else:
            place.process = (facts["pid"], facts["started"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """Say with -v which worker has which device."""
        orders = self._orders_of(node)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if orders is not None and reporter is not None and self._config.option.verbose > 0:
            reporter.write_line(f"[{node.gateway.id}] {_describe(orders)}")

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """End the run where a worker has not kept the device that it was given."""
        problem = getattr(node, "workeroutput", {}).get(PROBLEM)
        session = self._config.pluginmanager.get_plugin("dsession")
        if problem is not None and session is not None:
            session.shouldstop = session.shouldstop or f"{node.gateway.id}: {problem}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        """Say in the report of a worker's end which device it had."""
        orders = self._orders_of(report.node)
        if orders is not None:
            follows = "whoever replaces it gets the same one, after the engines have been ended and the memory is back"
            report.sections.append((SECTION, f"the worker had {_describe(orders)}; {follows}"))

    def _orders_of(self, node: Any) -> Orders | None:
        return next((place.orders for place in self._places if place.spec is node.gateway.spec), None)

    def _place(self, spec: Any, facts: dict[str, Any]) -> _Place:
        for place in self._places:
            if place.spec is spec:
                return place
        cards = tuple(uuid for _, uuid, *_ in facts["cards"])
        key = (facts["host"], tuple(sorted(facts["environ"].items())), cards)
        host = self._hosts.setdefault(key, _Host())
        place = _Place(spec, key, host.workers)
        host.workers += 1
        host.addresses.add(_address(spec))
        self._places.append(place)
        return place

    def _orders(self, node: Any, place: _Place, facts: dict[str, Any]) -> Orders | None:
        offered = _offer(facts)
        if not offered.devices:
            return None
        if facts["cuda"]:
            raise pytest.UsageError(
                f"worker {node.gateway.id} cannot be given a GPU: CUDA has been started in its process before pytest, "
                f"{facts['cuda']}, and sees {', '.join(device.text for device in offered.devices)} for good. Start it "
                "later than that, in a test or a fixture."
            )
        host = self._hosts[place.host]
        workers = max(host.workers, sum(self._addresses[address] for address in host.addresses))
        sharers = assign.sharers(len(offered.devices), place.rank, workers)
        return Orders(place.rank, sharers, offered)


def _offer(facts: dict[str, Any]) -> Offer:
    cards = [
        NvmlDevice(index, uuid, model, tuple(instances), partitioned)
        for index, uuid, model, instances, partitioned in facts["cards"]
    ]
    return offer(facts["environ"], cards, facts["reason"])


def _address(spec: Any) -> tuple[str, ...]:
    """Return what of a worker's description tells on which host and devices it will be."""
    names = ("popen", "ssh", "socket", "via", "installvia", "vagrant_ssh")
    where = [f"{name}={getattr(spec, name, None)}" for name in names]
    return (*where, *sorted(f"{name}={value}" for name, value in getattr(spec, "env", {}).items()))


def _describe(orders: Orders) -> str:
    home = orders.home
    known = f" ({home.uuid})" if home.uuid not in (None, home.text) else ""
    others = f", shared by {orders.sharers} workers" if orders.sharers > 1 else ""
    return f"{orders.offer.variables[0]}={home.text}{known}{others}"
