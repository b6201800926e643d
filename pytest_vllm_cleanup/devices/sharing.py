"""With how many workers this process shares its device, by its environment, which its children inherit."""

from __future__ import annotations

from collections.abc import Mapping

SHARERS = "PYTEST_VLLM_CLEANUP_SHARERS"
"""How many workers of a run have the same device, this one included; set in workers that were given one."""

WORKER = "PYTEST_XDIST_WORKER"
"""The name of a worker of pytest-xdist, in its environment and so in that of the processes that it starts."""

_WORKERS = "PYTEST_XDIST_WORKER_COUNT"


def sharers(environ: Mapping[str, str]) -> int | None:
    """Return how many workers have the device of this one; None where none was given to it."""
    value = environ.get(SHARERS, "")
    return int(value) if value.isdecimal() else None


def is_shared(environ: Mapping[str, str]) -> bool:
    """Whether other workers of the run may use the same devices at this moment."""
    known = sharers(environ)
    if known is not None:
        return known > 1
    workers = environ.get(_WORKERS, "")
    return workers.isdecimal() and int(workers) > 1
