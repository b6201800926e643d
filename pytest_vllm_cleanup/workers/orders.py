"""What the controller tells a worker about devices, as plain data that crosses pytest-xdist's wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pytest_vllm_cleanup.devices import assign
from pytest_vllm_cleanup.devices.offered import Offer, Offered
from pytest_vllm_cleanup.stash import ISOLATED_CHILD

KEY = "vllm_cleanup"
"""Where they are in ``config.workerinput``."""
PREDECESSOR = "vllm_cleanup_predecessor"
"""Where number and start of the process are there that a worker replaces."""


@dataclass(frozen=True)
class Orders:
    """A worker's place among those of its host.

    Attributes:
        rank: its number among the workers that share these devices, from 0.
        sharers: how many workers have the same device, this one included.
        offer: the devices of its host.
    """

    rank: int
    sharers: int
    offer: Offer

    @property
    def home(self) -> Offered:
        """The worker's own device."""
        return assign.home(self.offer.devices, self.rank)

    def as_data(self) -> dict[str, Any]:
        """Return it as dictionaries, lists, text and numbers."""
        return {
            "rank": self.rank,
            "sharers": self.sharers,
            "variables": list(self.offer.variables),
            "devices": [[device.text, device.key, device.uuid] for device in self.offer.devices],
        }


def orders_of(config: pytest.Config) -> Orders | None:
    """Return the orders of a worker; None in other processes, and where no device was given."""
    data: dict[str, Any] | None = getattr(config, "workerinput", {}).get(KEY)
    # The process of an isolated test has its parent's input; its devices are those of the environment, and the parent
    # waits for the turn.
    if data is None or config.pluginmanager.has_plugin(ISOLATED_CHILD):
        return None
    devices = tuple(Offered(*device) for device in data["devices"])
    return Orders(data["rank"], data["sharers"], Offer(tuple(data["variables"]), devices))
