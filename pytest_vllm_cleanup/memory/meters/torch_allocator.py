"""The caching allocator of torch in this process: exact, and blind for every other process."""

from __future__ import annotations

import sys
from typing import Any

from ..reading import Reading
from .processes import holds_context


def initialised_torch() -> Any | None:
    """Return the torch module if it is imported and CUDA is up in this process, else None; changes neither."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # A torch that is just being imported has no such function yet.
    is_initialized = getattr(cuda, "is_initialized", None)
    return sys.modules["torch"] if is_initialized is not None and is_initialized() else None


def has_context(torch: Any, ordinal: int) -> bool:
    """Whether this process has a CUDA context on the device, without creating one."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(ordinal)) if ask is not None else torch.cuda.memory_reserved(ordinal) > 0


def may_have_context(ordinal: int) -> bool:
    """Whether this process may have a CUDA context on the device; False only where that is certain."""
    torch = initialised_torch()
    return holds_context() if torch is None else has_context(torch, ordinal)


def cuda_uuids(torch: Any) -> tuple[str, ...] | None:
    """Return what CUDA calls its devices, in its order; None where this torch does not say (older than 2.4)."""
    count = torch.cuda.device_count()
    uuids = [getattr(torch.cuda.get_device_properties(ordinal), "uuid", None) for ordinal in range(count)]
    return None if None in uuids else tuple(str(uuid) for uuid in uuids)


class TorchAllocatorMeter:
    """Reads ``torch.cuda.memory_allocated`` and ``memory_reserved`` on devices with a CUDA context.

    Both are counters of the allocator: reading them takes no memory and starts nothing.
    """

    name = "torch"
    reason = ""

    def available(self) -> bool:
        """Whether CUDA is up in this process."""
        return initialised_torch() is not None

    def read(self, ours: frozenset[int]) -> dict[str, Reading]:  # noqa: ARG002 - knows this process alone
        """Read every device on which this process has a context; see ``Meter``."""
        torch = initialised_torch()
        if torch is None:
            return {}
        readings = {}
        try:
            for ordinal in range(torch.cuda.device_count()):
                if has_context(torch, ordinal):
                    device = f"cuda:{ordinal}"
                    readings[device] = Reading(
                        device=device,
                        meters=(self.name,),
                        allocated=torch.cuda.memory_allocated(ordinal),
                        reserved=torch.cuda.memory_reserved(ordinal),
                    )
        except RuntimeError as error:
            # A pluggable allocator keeps no counters; after a device-side assert every call may fail.
            self.reason = f"torch's allocator gave no figures ({error})"
            return {}
        self.reason = ""
        return readings
