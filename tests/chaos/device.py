"""The device that engines run on here: a GPU if there is one, else the processor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Any


class Device:
    """What NVML says about all GPUs of this machine. It creates no CUDA context, so it disturbs nothing."""

    def __init__(self) -> None:
        self._gpus: list[Any] = []
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    @property
    def is_gpu(self) -> bool:
        return bool(self._gpus)

    @property
    def names(self) -> list[str]:
        """The models of the GPUs, with the driver's version."""
        if not self._gpus:
            return []
        import pynvml

        driver = pynvml.nvmlSystemGetDriverVersion()
        return [f"{pynvml.nvmlDeviceGetName(gpu)}, driver {driver}" for gpu in self._gpus]

    def held(self, pids: Collection[int]) -> int | None:
        """Return the bytes that these processes hold on all GPUs together, None without a GPU.

        Process by process, so that others may use the devices meanwhile.
        """
        if not self._gpus:
            return None
        import pynvml

        uses = [use for gpu in self._gpus for use in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
        return sum(int(use.usedGpuMemory or 1) for use in uses if use.pid in pids)

    def stayed(self, pids: Collection[int], deadline: float) -> int | None:
        """Wait until these processes hold nothing, at most until ``deadline``, and return what they do."""
        held = self.held(pids)
        while held and time.time() < deadline:
            time.sleep(0.05)
            held = self.held(pids)
        return held

    def engine(self, in_process: bool) -> dict[str, Any]:
        """Return the arguments of a small engine."""
        small = {"max_model_len": 256, "enforce_eager": True}
        if self._gpus:
            # With a fixed cache, vLLM does not mind that others take and give memory while it starts.
            fixed = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
            return {**small, **fixed, "max_num_seqs": 2}
        # Some processors say that they have the instructions of vLLM's bfloat16 attention, and have not.
        small |= {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
        if not in_process:
            # On processors vLLM puts a worker below the core, which takes as long to start again. By this name it
            # does not, as on a GPU; tests that are about workers ask for one.
            small["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        return small
