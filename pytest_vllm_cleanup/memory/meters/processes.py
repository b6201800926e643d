"""What our own process table tells of a process that may be on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from pytest_vllm_cleanup.devices import driver
from pytest_vllm_cleanup.processes import proc

from ..reading import ProcessUse

# Every process with a CUDA context holds one of these open: the driver's memory manager on Linux, its only device
# on WSL, and its memory map on Jetson. So do processes that only ask NVML, at least since driver 580.
_OPEN_WITH_CUDA = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/nvmap")

# They serve the whole session and hold nothing of an engine: Python's helper for shared memory, and this plugin's own.
# All words of one: a test may start a process with the name of this plugin in its command line.
_HELPERS = (
    ("multiprocessing.resource_tracker",),
    ("pytest_vllm_cleanup", "guardian"),
    ("pytest_vllm_cleanup", "isolation import fresh"),  # waits for its order; one at work has ended when it is judged
)


def is_helper(command: Iterable[str]) -> bool:
    """Whether a command line is that of a helper, which is no process of an engine and no leak."""
    line = " ".join(command)
    return any(all(word in line for word in words) for words in _HELPERS)


def uses_driver(pid: int) -> bool:
    """Whether another process may have a CUDA context; False only where that is certain, as when it has ended."""
    try:
        return any(_target(entry).startswith(_OPEN_WITH_CUDA) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return not Path("/proc/self").exists()
    except OSError:  # another user's, or it has just ended
        process = proc.identify(pid)
        return process is not None and proc.is_running(process)


def holds_context() -> bool:
    """Whether this process may have a CUDA context, asked of the driver without loading or starting it."""
    library = driver.loaded()
    if library is None:
        return False
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    error = library.cuDeviceGetCount(ctypes.byref(count))
    if error:
        return bool(error != driver.NOT_INITIALISED)
    return any(
        library.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) or active.value
        for number in range(count.value)
    )


def users_of_driver(pids: Iterable[int]) -> tuple[ProcessUse, ...]:
    """Return those of our processes that live and may have a CUDA context."""
    return tuple(ProcessUse(pid, None, process_name(pid), ours=True) for pid in sorted(pids) if uses_driver(pid))


def process_name(pid: int) -> str | None:
    """Return what a process of our table is called, None if there is none."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    try:
        name: str = psutil.Process(pid).name()
    except psutil.Error:
        return None
    return name


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed meanwhile
        return ""
