"""The driver's own figures, by its management library (NVML). Never creates a CUDA context."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ...devices import inventory
from ...devices.visible import NvmlDevice, VisibleDevice, from_cuda, from_environment
from ..reading import ProcessUse, Reading
from .processes import process_name, users_of_driver, uses_driver
from .torch_allocator import cuda_uuids, initialised_torch, may_have_context

T = TypeVar("T")

# "Not available" is all ones in 64 bits; some wrappers pass it on instead of None.
_NO_FIGURE = 1 << 62


class NvmlMeter:
    """Bytes in use on the visible NVIDIA devices, and by which process.

    Args:
        environ: Where ``CUDA_VISIBLE_DEVICES`` is read, once: CUDA reads it once, too.
        module: The module ``pynvml`` (distribution ``nvidia-ml-py``); imported at the first read if None.
        deadline: Seconds after which a read counts as hung. The driver can hang for good, so that after one
            hang this meter reads nothing more in this session.
        widened: Whether the environment may name devices beside those that CUDA sees in this process, which other
            processes use. They are numbered after these.
    """

    name = "nvml"

    def __init__(
        self, environ: Mapping[str, str], *, module: Any = None, deadline: float = 5.0, widened: bool = False
    ) -> None:
        self._environ = {key: environ[key] for key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if key in environ}
        self._module = module
        self._widened = widened
        self._deadline = deadline
        self._hung = False
        self._failure = ""
        self._refusal = ""
        self._pid: int | None = None
        self._inventory: tuple[NvmlDevice, ...] = ()
        self._cuda_devices: tuple[VisibleDevice, ...] | None = None
        self._versions: dict[str, int | None] = {}
        self._seen_ours = False

    @property
    def reason(self) -> str:
        """Why a device cannot be measured; empty while all of them can."""
        # Told apart from other failures: the hung thread may still wake up and report something.
        if self._hung:
            return f"NVML did not answer within {self._deadline:g} s and is asked no more"
        return self._failure

    def available(self) -> bool:
        """Whether the driver answers and a device is visible."""
        return bool(self._guarded(self._visible))

    def read(self, ours: frozenset[int]) -> dict[str, Reading]:
        """Read every visible device; see ``Meter``."""
        return self._guarded(lambda: self._read(ours)) or {}

    def _guarded(self, function: Callable[[], T]) -> T | None:
        """Run something that asks the driver; None, and the reason kept, if it fails or hangs."""
        if self._hung:
            return None
        self._failure = ""
        done: list[T] = []

        def work() -> None:
            try:
                done.append(self._with_library(function))
            except Exception as error:  # without the module there is no class of its errors to name
                self._failure = f"NVML: {type(error).__name__}: {error}"

        thread = threading.Thread(target=work, name="vllm-cleanup-nvml", daemon=True)
        thread.start()
        thread.join(self._deadline)
        self._hung = thread.is_alive()
        if self._hung or not done:
            return None
        if not done[0]:
            self._failure = "NVML: no device is visible to this process"
        return done[0]

    def _with_library(self, function: Callable[[], T]) -> T:
        """Run something with the library initialised, once again if somebody else shut it down."""
        self._initialise()
        try:
            return function()
        except self._module.NVMLError_Uninitialized:
            self._pid = None
            self._initialise()
            return function()

    def _initialise(self) -> None:
        # Handles do not survive a fork.
        if self._pid == os.getpid():
            return
        if self._module is None:
            self._module = importlib.import_module("pynvml")
        self._module.nvmlInit()
        cards = range(self._module.nvmlDeviceGetCount())
        self._inventory = tuple(inventory.card(self._module, index, self._ask) for index in cards)
        self._cuda_devices = None
        self._pid = os.getpid()

    def _visible(self) -> tuple[VisibleDevice, ...]:
        # Once CUDA is up, what it sees is fixed, and a failed kernel may make later questions fail.
        if self._cuda_devices is None and (torch := initialised_torch()) is not None:
            uuids = cuda_uuids(torch)
            self._cuda_devices = None if uuids is None else from_cuda(uuids, self._inventory)
        if self._cuda_devices is None:
            return from_environment(self._environ, self._inventory)
        if not self._widened:
            return self._cuda_devices
        seen = {device.uuid for device in self._cuda_devices}
        more = [
            d for d in from_environment(self._environ, self._inventory) if d.uuid is not None and d.uuid not in seen
        ]
        beside = tuple(VisibleDevice(number, d.uuid) for number, d in enumerate(more, start=len(seen)))
        return self._cuda_devices + beside

    def _read(self, ours: frozenset[int]) -> dict[str, Reading]:
        living = users_of_driver(ours - {os.getpid()})
        readings = [replace(self._read_device(device, ours), living=living) for device in self._visible()]
        # One of ours in the list of any device shows that its numbers are those of our process table.
        for reading in readings:
            on_it = {use.pid for use in living} | ({os.getpid()} if reading.context else set())
            self._seen_ours = self._seen_ours or any(use.pid in on_it for use in reading.processes or ())
        return {reading.device: self._told(reading) for reading in readings}

    def _read_device(self, device: VisibleDevice, ours: frozenset[int]) -> Reading:
        self._refusal = ""
        if device.uuid is None:
            self._failure = f"which one is {device.name} is not known: {device.doubt}"
            return Reading(device=device.name)
        handle = self._ask("nvmlDeviceGetHandleByUUID", device.uuid)
        if handle is None:
            self._failure = f"NVML does not give {device.name} ({device.uuid}): {self._refusal}"
            return Reading(device=device.name, identity=device.uuid)
        used, total = self._memory(device.uuid, handle)
        processes = self._processes(handle, ours)
        if used is None and processes is None:
            self._failure = f"NVML gives no figure for {device.name}: {self._refusal}"
        return Reading(
            device=device.name,
            meters=(self.name,),
            used=used,
            total=total,
            processes=processes,
            context=may_have_context(device.ordinal),
            identity=device.uuid,
        )

    def _told(self, reading: Reading) -> Reading:
        """Fill in what our processes and others hold, where they can be told apart.

        In a container the driver may list the host's numbers, or nobody: our own processes are then strangers by
        number, and another one may by chance have the number of one of ours.
        """
        if reading.processes is None:
            return reading
        me = os.getpid()
        missing = (
            reading.context and initialised_torch() is not None and all(use.pid != me for use in reading.processes)
        )
        trusted = self._seen_ours and not missing
        uses = reading.processes
        if not trusted:
            uses = tuple(
                ProcessUse(use.pid, use.bytes, use.name if uses_driver(use.pid) else None, ours=False) for use in uses
            )
        reading = replace(reading, processes=uses, listed=trusted)
        if not trusted and not reading.absent:
            return reading
        return replace(
            reading,
            own=_total(use for use in uses if use.ours and use.pid == me),
            children=_total(use for use in uses if use.ours and use.pid != me),
            others=_total(use for use in uses if not use.ours),
        )

    def _memory(self, uuid: str, handle: Any) -> tuple[int | None, int | None]:
        """Return used and total bytes, for one device always by the same call.

        The first version of the call counts what the driver keeps for itself as used, the second does not;
        figures of the two are hundreds of megabytes apart.
        """
        second = getattr(self._module, "nvmlMemory_v2", None)
        for version in (self._versions[uuid],) if uuid in self._versions else (second, None):
            arguments = (handle,) if version is None else (handle, version)
            memory = self._ask("nvmlDeviceGetMemoryInfo", *arguments)
            if memory is not None:
                self._versions[uuid] = version
                return _figure(memory.used), _figure(memory.total)
        return None, None

    def _processes(self, handle: Any, ours: frozenset[int]) -> tuple[ProcessUse, ...] | None:
        """Who is on the device; None if the driver does not say."""
        compute = self._list("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        # Clients of the multi-process service stand in a list of their own. Desktop programs are read since
        # they are tenants, whose growth would look like ours where nobody else is listed.
        listed = [
            *compute,
            *(self._list("nvmlDeviceGetMPSComputeRunningProcesses", handle) or ()),
            *(self._list("nvmlDeviceGetGraphicsRunningProcesses", handle) or ()),
        ]
        sizes: dict[int, int | None] = {}
        for entry in listed:
            # Whoever is listed holds something, so that 0 only means that it is not told.
            size = _figure(entry.usedGpuMemory) or None
            known = sizes.get(entry.pid)
            sizes[entry.pid] = max(known, size) if known is not None and size is not None else known or size
        mine = ours | {os.getpid()}
        return tuple(ProcessUse(pid, size, process_name(pid), ours=pid in mine) for pid, size in sorted(sizes.items()))

    def _list(self, name: str, handle: Any) -> list[Any] | None:
        # The plain name stands for the newest version, which an older driver lacks.
        for suffix in ("", "_v2"):
            found: list[Any] | None = self._ask(name + suffix, handle)
            if found is not None:
                return found
        return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the library; None where this driver, this device or this user may not have the answer."""
        try:
            return getattr(self._module, name)(*arguments)
        except self._module.NVMLError_Uninitialized:
            raise
        except Exception as error:  # not supported, no permission, not in this library, device lost
            # The first one tells; those after it are of second choices.
            self._refusal = self._refusal or f"{name}: {error}"
            return None


def _figure(value: int | None) -> int | None:
    return None if value is None or not 0 <= value < _NO_FIGURE else value


def _total(uses: Any) -> int | None:
    """Return the sum of what some processes hold; None if it is not known of one of them."""
    sizes = [use.bytes for use in uses]
    return None if None in sizes else sum(sizes)
