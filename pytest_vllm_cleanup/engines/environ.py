"""Environment variables that engines write for the whole process, and how they are given back."""

from __future__ import annotations

import os

from pytest_vllm_cleanup.engines.registry import EngineHandle, registry
from pytest_vllm_cleanup.engines.traces import Written


def give_back(handle: EngineHandle) -> None:
    """Put back what an engine that is being closed wrote; while others live, one of them takes that over."""
    others = registry.others(handle)
    if others:
        # The next younger one, else the next older: what one wrote, the next has found.
        heir = next((other for other in others if other.number > handle.number), others[-1])
        older, younger = sorted((handle, heir), key=lambda engine: engine.number)
        heir.traces.environ = chained(older.traces.environ, younger.traces.environ)
    else:
        restore(handle.traces.environ)


def chained(older: Written, younger: Written) -> Written:
    """Return what two engines wrote into the environment, one after the other, as if one had written it."""
    return {
        name: (older.get(name, younger.get(name, (None, None)))[0], younger.get(name, older.get(name, (None, None)))[1])
        for name in older.keys() | younger.keys()
    }


def restore(written: Written) -> None:
    """Put back the variables that an engine wrote, except those that somebody has changed since."""
    for name, (old, new) in written.items():
        if os.environ.get(name) != new:
            continue
        if old is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = old
