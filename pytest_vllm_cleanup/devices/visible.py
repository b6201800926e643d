"""From the caller's device numbers to the driver's devices.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` leaves, fastest first unless ``CUDA_DEVICE_ORDER`` is
``PCI_BUS_ID``. The driver's management library (NVML) knows neither variable and orders by bus address. The
rules of the variable: "CUDA Environment Variables" in the CUDA programming guide, and torch's
``_parse_visible_devices``, which follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# As strtoul reads it: CUDA takes "1gpu" for 1.
_INDEX = re.compile(r"[+]?(\d+)", re.ASCII)
_BY_SPEED = "cards of different models are numbered by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
_PARTITIONED = (
    "its card is partitioned, and its instances may not be listed here; name one in CUDA_VISIBLE_DEVICES (MIG-...)"
)


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A device as the driver lists it.

    Attributes:
        index: The driver's number of it.
        uuid: ``GPU-...``.
        model: Its product name.
        instances: UUIDs (``MIG-...``) of its instances, if it is partitioned and they may be listed.
        partitioned: Whether it is partitioned (MIG). Its own figures are then not those of any instance.
    """

    index: int
    uuid: str
    model: str
    instances: tuple[str, ...] = ()
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A device as the caller numbers it.

    Attributes:
        ordinal: The N of ``cuda:N``.
        uuid: ``GPU-...`` or ``MIG-...``, by which the driver finds it; None if it cannot be told which one
            it is.
        doubt: Why it cannot be told, with what to do about it.
    """

    ordinal: int
    uuid: str | None
    doubt: str = ""

    @property
    def name(self) -> str:
        """``"cuda:N"``."""
        return f"cuda:{self.ordinal}"


def parse_visible(value: str | None) -> tuple[int, ...] | tuple[str, ...] | None:
    """Read ``CUDA_VISIBLE_DEVICES``.

    Returns:
        None for all devices (the variable is not set), else indices or (abbreviated) UUIDs in order. The
        first entry that is invalid, such as -1, ends the list; an entry given twice empties it.
    """
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    for prefix in ("GPU-", "MIG-"):
        if entries[0].startswith(prefix):
            uuids: list[str] = []
            for entry in entries:
                if not entry.startswith(prefix):
                    break
                uuids.append(entry)
            return tuple(uuids) if len(set(uuids)) == len(uuids) else ()
    indices: list[int] = []
    for entry in entries:
        if not (found := _INDEX.match(entry)):
            break
        indices.append(int(found.group(1)))
    return tuple(indices) if len(set(indices)) == len(indices) else ()


def from_environment(environ: Mapping[str, str], inventory: Sequence[NvmlDevice]) -> tuple[VisibleDevice, ...]:
    """Return the devices that a process with this environment will see, before CUDA is up in it.

    Where cards of different models are numbered by speed and only some of them are visible, nobody but CUDA
    can tell which ones these are: their ``uuid`` is None. Set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or name the
    devices by UUID, to have them told apart.
    """
    wanted = parse_visible(environ.get("CUDA_VISIBLE_DEVICES"))
    if wanted is None:
        wanted = tuple(range(len(inventory)))
    uuids: list[str] = []
    for entry in wanted:
        uuid = _by_index(entry, inventory) if isinstance(entry, int) else _by_uuid(entry, inventory)
        if uuid is None:
            break
        uuids.append(uuid)
    by_speed = environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({card.model for card in inventory}) > 1
    by_index = bool(wanted) and isinstance(wanted[0], int)
    if by_speed and by_index and len(uuids) < len(inventory):
        return tuple(VisibleDevice(ordinal, None, _BY_SPEED) for ordinal in range(len(uuids)))
    hidden = {card.uuid for card in inventory if card.partitioned and not card.instances}
    return tuple(
        VisibleDevice(ordinal, None, _PARTITIONED) if uuid in hidden else VisibleDevice(ordinal, uuid)
        for ordinal, uuid in enumerate(uuids)
    )


def from_cuda(uuids: Sequence[str], inventory: Sequence[NvmlDevice]) -> tuple[VisibleDevice, ...]:
    """Return the devices that CUDA sees, once it is up.

    Args:
        uuids: What CUDA reports for its devices in order, without or with the driver's prefix.
        inventory: What the driver lists.
    """
    known = {_bare(uuid): uuid for card in inventory for uuid in (card.uuid, *card.instances)}
    # Whole cards are always listed, so what is not can only be an instance whose card may not be asked.
    return tuple(
        VisibleDevice(ordinal, known.get(_bare(uuid), f"MIG-{_bare(uuid)}")) for ordinal, uuid in enumerate(uuids)
    )


def _by_index(index: int, inventory: Sequence[NvmlDevice]) -> str | None:
    if index >= len(inventory):
        return None
    card = inventory[index]
    # CUDA gives the first instance of a card that is partitioned and named as a whole.
    return card.instances[0] if card.instances else card.uuid


def _by_uuid(prefix: str, inventory: Sequence[NvmlDevice]) -> str | None:
    known = [uuid for card in inventory for uuid in (card.uuid, *card.instances)]
    matches = [uuid for uuid in known if uuid.lower().startswith(prefix.lower())]
    if len(matches) == 1:
        return matches[0]
    # An instance may be listed nowhere and still be found by its full name (missing permission on its card).
    return prefix if not matches and prefix.startswith("MIG-") else None


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
