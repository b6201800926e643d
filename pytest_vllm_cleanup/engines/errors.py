"""What can go wrong with an engine, as exceptions that say what to do next."""

from __future__ import annotations


class EngineClosedError(RuntimeError):
    """An engine was used after it was closed."""


class UnsupportedVllmError(RuntimeError):
    """vLLM is absent, or older than the oldest release that can be closed safely."""


class ModelDoesNotFitError(ValueError):
    """The memory budget cannot hold the model, or the device has less than the budget free."""


class DeviceQuarantinedError(RuntimeError):
    """An engine was not started: what an earlier test has leaked leaves less memory free than it asks for."""


class EngineStartTimeoutError(TimeoutError):
    """An engine had not started when its ``start_timeout`` was over, and was stopped."""


class EngineCleanupWarning(UserWarning):
    """A step of closing an engine failed; the other steps ran."""
