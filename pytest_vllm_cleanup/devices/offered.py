"""Which devices a run may share out among its workers, in the caller's own spelling.

What is offered is what the caller made visible, and it is named as the caller names it, since whoever reads the
variable next (CUDA, ROCm, vLLM) reads it in the same environment: an index stays an index, a UUID a UUID. But
abbreviated ones, which CUDA understands, are written in full: vLLM has the driver look them up, which does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .visible import NvmlDevice, from_environment, parse_visible

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
ORDINAL = "GPU_DEVICE_ORDINAL"
CONTAINER = "NVIDIA_VISIBLE_DEVICES"
VARIABLES = (CUDA, HIP, ROCR, ORDINAL, CONTAINER, "CUDA_DEVICE_ORDER")
"""All that is read here, besides what the driver lists."""


@dataclass(frozen=True, slots=True)
class Offered:
    """One device.

    Attributes:
        text: What names it in the variable.
        key: What names it on this machine, for locks: its UUID where that is known.
        uuid: Its UUID, None if it is not known.
    """

    text: str
    key: str
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The devices, in the caller's order.

    Attributes:
        variables: The variables that have to name a worker's devices.
        devices: What can be shared out.
        reason: Why there are none, if there are none.
    """

    variables: tuple[str, ...]
    devices: tuple[Offered, ...]
    reason: str = ""

    def environment(self, devices: Sequence[Offered]) -> dict[str, str]:
        """Return what shows some of the devices alone."""
        return dict.fromkeys(self.variables, ",".join(device.text for device in devices))


def offer(environ: Mapping[str, str], inventory: Sequence[NvmlDevice], reason: str = "") -> Offer:
    """Return what an environment offers.

    NVIDIA: ``CUDA_VISIBLE_DEVICES``; where it is not set, all cards that the driver lists, or those of them that
    ``NVIDIA_VISIBLE_DEVICES`` names by UUID. That variable is for the container's runtime, and CUDA does not read it:
    a privileged container sees all cards of its host, whatever share of them it was given. Its indices count
    the host's cards and mean nothing inside.

    ROCm: the first that is set of ``HIP_VISIBLE_DEVICES``, ``ROCR_VISIBLE_DEVICES``, ``GPU_DEVICE_ORDINAL`` (by AMD's
    "GPU isolation techniques"), where the driver of NVIDIA lists nothing. HIP and vLLM read ``CUDA_VISIBLE_DEVICES``
    too, and vLLM wants it to agree with ``HIP_VISIBLE_DEVICES``. Without a variable nobody counts AMD's cards here.

    Args:
        environ: The variables of the process that will use the devices.
        inventory: What NVIDIA's driver lists.
        reason: Why it lists nothing.
    """
    if not inventory:
        return _rocm(environ, reason)
    if environ.get(CUDA) is not None:
        return _named(environ, inventory)
    return _listed(environ, inventory)


def _named(environ: Mapping[str, str], inventory: Sequence[NvmlDevice]) -> Offer:
    wanted = parse_visible(environ[CUDA]) or ()
    found = from_environment(environ, inventory)
    texts = [str(entry) for entry in wanted[: len(found)]]
    devices = tuple(
        Offered(text if text.isdecimal() else uuid or text, uuid or _indexed(text), uuid)
        for text, uuid in zip(texts, (device.uuid for device in found), strict=True)
    )
    return Offer((CUDA,), devices, "" if devices else f"{CUDA}={environ[CUDA]!r} names no device of this machine")


def _listed(environ: Mapping[str, str], inventory: Sequence[NvmlDevice]) -> Offer:
    if any(card.partitioned and not card.instances for card in inventory):
        hidden = "a card is partitioned (MIG), and its instances may not be listed here"
        return Offer((CUDA,), (), f"{hidden}; name them in {CUDA} (MIG-...)")
    if any(card.instances for card in inventory):
        # CUDA gives a process one instance at most, and numbers cards without those that are partitioned.
        uuids = [uuid for card in inventory for uuid in card.instances or (card.uuid,)]
        devices = tuple(Offered(uuid, uuid, uuid) for uuid in uuids)
    else:
        known = [device.uuid for device in from_environment(environ, inventory)]
        devices = tuple(Offered(str(index), uuid or _indexed(str(index)), uuid) for index, uuid in enumerate(known))
        devices = _told_apart(environ, inventory, devices)
    given = {entry.strip().lower() for entry in environ.get(CONTAINER, "").split(",")}
    granted = tuple(device for device in devices if device.uuid is not None and device.uuid.lower() in given)
    return Offer((CUDA,), granted or devices)


def _told_apart(
    environ: Mapping[str, str], inventory: Sequence[NvmlDevice], devices: tuple[Offered, ...]
) -> tuple[Offered, ...]:
    """Name cards by UUID where a number alone may mean another card to CUDA than to the driver."""
    by_speed = environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({card.model for card in inventory}) > 1
    return tuple(Offered(card.uuid, card.uuid, card.uuid) for card in inventory) if by_speed else devices


def _rocm(environ: Mapping[str, str], reason: str) -> Offer:
    for variable in (HIP, ROCR, ORDINAL, CUDA):
        value = environ.get(variable)
        if value is None:
            continue
        texts = [entry.strip() for entry in value.split(",")]
        valid = [text for text in texts if text.isdecimal() or text.startswith(("GPU-", "MIG-"))]
        if valid != texts or len(set(texts)) != len(texts):
            return Offer((variable,), (), f"{variable}={value!r} names no device")
        # A number of one variable counts what another one leaves, so the locks' names carry all of them.
        outer = ":".join(environ[name] for name in (ROCR, ORDINAL) if name != variable and name in environ)
        devices = tuple(Offered(text, text if text.startswith("GPU-") else _indexed(text, outer)) for text in texts)
        also = (CUDA,) if variable == HIP and CUDA in environ else ()
        return Offer((variable, *also), devices)
    return Offer((CUDA,), (), reason or "no device is visible")


def _indexed(text: str, outer: str = "") -> str:
    return "-".join(filter(None, ("index", outer.replace(",", "."), text)))
