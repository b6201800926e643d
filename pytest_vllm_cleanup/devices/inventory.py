"""Which cards the driver lists, asked of its management library (NVML). Never creates a CUDA context."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .visible import NvmlDevice

Ask = Callable[..., Any]
"""Calls a function of the library by name; None where this driver, device or user may not have the answer."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the driver lists.

    Attributes:
        cards: In the driver's order.
        reason: Why there are none, if there are none.
    """

    cards: tuple[NvmlDevice, ...] = ()
    reason: str = ""


def take(module: Any = None, *, deadline: float = 5.0) -> Inventory:
    """Ask the driver once, and leave its library as it was before.

    Args:
        module: The module ``pynvml``; imported if None.
        deadline: Seconds after which the driver counts as hung: under WSL it can hang for good.
    """
    found: list[Inventory] = []

    def work() -> None:
        try:
            nvml = importlib.import_module("pynvml") if module is None else module
            nvml.nvmlInit()
            try:
                cards = tuple(card(nvml, index, _asking(nvml)) for index in range(nvml.nvmlDeviceGetCount()))
            finally:
                nvml.nvmlShutdown()
            found.append(Inventory(cards, "" if cards else "NVML lists no device"))
        except Exception as error:  # without the module there is no class of its errors to name
            found.append(Inventory(reason=f"NVML: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name="vllm-cleanup-inventory", daemon=True)
    thread.start()
    thread.join(deadline)
    return found[0] if found else Inventory(reason=f"NVML did not answer within {deadline:g} s")


def card(nvml: Any, index: int, ask: Ask) -> NvmlDevice:
    """Describe one card.

    Args:
        nvml: The module ``pynvml``, initialised.
        index: The driver's number of it.
        ask: How to call what may be refused.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    mode = ask("nvmlDeviceGetMigMode", handle)
    partitioned = bool(mode) and mode[0] == 1
    instances: list[str] = []
    if partitioned:
        for number in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            uuid = None if instance is None else ask("nvmlDeviceGetUUID", instance)
            if uuid is not None:
                instances.append(as_text(uuid))
    return NvmlDevice(
        index=index,
        uuid=as_text(nvml.nvmlDeviceGetUUID(handle)),
        model=as_text(ask("nvmlDeviceGetName", handle) or ""),
        instances=tuple(instances),
        partitioned=partitioned,
    )


def as_text(value: str | bytes) -> str:
    """Return what the library calls something; older versions give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _asking(nvml: Any) -> Ask:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except Exception:  # not supported, no permission, not in this library
            return None

    return ask
