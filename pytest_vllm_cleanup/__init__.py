"""vLLM engines in tests that give every byte of GPU memory back, and a marker that proves it.

The names here work without pytest::

    from pytest_vllm_cleanup import assert_gpu_released, close_engine, vllm_engine

    with assert_gpu_released():
        with vllm_engine(model="facebook/opt-125m") as llm:
            llm.generate("Hello")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_vllm_cleanup.checks.context import GpuMemoryLeakError, assert_gpu_released
    from pytest_vllm_cleanup.checks.peak import GpuMemory
    from pytest_vllm_cleanup.checks.quarantine import Leak
    from pytest_vllm_cleanup.engines.close import close_engine, vllm_engine
    from pytest_vllm_cleanup.engines.errors import (
        DeviceQuarantinedError,
        EngineCleanupWarning,
        EngineClosedError,
        EngineStartTimeoutError,
        ModelDoesNotFitError,
        UnsupportedVllmError,
    )
    from pytest_vllm_cleanup.engines.registry import CloseReport
    from pytest_vllm_cleanup.guard import VllmCleanupWarning
    from pytest_vllm_cleanup.isolation.call import run_isolated
    from pytest_vllm_cleanup.isolation.errors import IsolatedProcessError, IsolatedTimeoutError
    from pytest_vllm_cleanup.runners.vllm_runner import VllmRunner

# Imported on first use: loading the plugin must cost a test run next to nothing.
_HOMES = {
    "CloseReport": "engines.registry",
    "DeviceQuarantinedError": "engines.errors",
    "EngineCleanupWarning": "engines.errors",
    "EngineClosedError": "engines.errors",
    "EngineStartTimeoutError": "engines.errors",
    "GpuMemory": "checks.peak",
    "GpuMemoryLeakError": "checks.context",
    "IsolatedProcessError": "isolation.errors",
    "IsolatedTimeoutError": "isolation.errors",
    "Leak": "checks.quarantine",
    "ModelDoesNotFitError": "engines.errors",
    "UnsupportedVllmError": "engines.errors",
    "VllmCleanupWarning": "guard",
    "VllmRunner": "runners.vllm_runner",
    "assert_gpu_released": "checks.context",
    "close_engine": "engines.close",
    "run_isolated": "isolation.call",
    "vllm_engine": "engines.close",
}

__all__ = [
    "CloseReport",
    "DeviceQuarantinedError",
    "EngineCleanupWarning",
    "EngineClosedError",
    "EngineStartTimeoutError",
    "GpuMemory",
    "GpuMemoryLeakError",
    "IsolatedProcessError",
    "IsolatedTimeoutError",
    "Leak",
    "ModelDoesNotFitError",
    "UnsupportedVllmError",
    "VllmCleanupWarning",
    "VllmRunner",
    "assert_gpu_released",
    "close_engine",
    "run_isolated",
    "vllm_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
