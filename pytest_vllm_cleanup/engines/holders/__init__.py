"""Known pins of vLLM 0.11 and later: what outlives an engine in its process, and how it is let go.

A module that was never imported holds nothing and is never imported here; an attribute that the
installed release does not have is passed over. Nothing here keeps a reference to an engine, a module or
a tensor while or after it runs: an error is kept as text only.
"""

from __future__ import annotations

import time

from pytest_vllm_cleanup.engines.holders.allocator import keep_pool_allocators
from pytest_vllm_cleanup.engines.holders.communication import COMMUNICATION
from pytest_vllm_cleanup.engines.holders.constants import CONSTANTS
from pytest_vllm_cleanup.engines.holders.dictionaries import DICTIONARIES
from pytest_vllm_cleanup.engines.holders.entry import Holder, Released, find
from pytest_vllm_cleanup.engines.holders.function_caches import FUNCTION_CACHES
from pytest_vllm_cleanup.engines.holders.lru import clear_lru_caches_holding
from pytest_vllm_cleanup.engines.holders.models import MODEL_BUFFERS
from pytest_vllm_cleanup.engines.holders.process import PROCESS
from pytest_vllm_cleanup.engines.holders.workspaces import WORKSPACES

__all__ = [
    "HOLDERS",
    "Holder",
    "Released",
    "clear_lru_caches_holding",
    "keep_pool_allocators",
    "present",
    "release",
    "release_holders",
]

# Connectors first: their shutdown may still look at what the others hold.
HOLDERS: tuple[Holder, ...] = (
    COMMUNICATION + FUNCTION_CACHES + DICTIONARIES + WORKSPACES + CONSTANTS + MODEL_BUFFERS + PROCESS
)


def present(holder: Holder) -> bool:
    """Whether a holder exists in the installed, loaded vLLM and holds anything now."""
    place = find(holder)
    return place is not None and holder.release.holds(place)


def release(holder: Holder) -> None:
    """Let go of what a holder holds, if anything.

    Raises:
        Exception: whatever vLLM's own release raises.
    """
    place = find(holder)
    if place is not None and holder.release.holds(place):
        holder.release.run(place)


def release_holders(*, last_engine: bool, collected: bool = False) -> list[Released]:
    """Let go of what the known pins hold now, each guarded for itself.

    To be called twice: before the garbage collection, and after it for memory pools, which can be released
    only when their tensors are gone.

    Args:
        last_engine: whether no other engine lives in this process; without it, shared holders are left alone.
        collected: whether the closed engine has been collected.

    Returns:
        The holders that held something, in the order of their release.
    """
    chosen = (
        holder for holder in HOLDERS if holder.after_collection is collected and (last_engine or not holder.shared)
    )
    return [outcome for outcome in map(_try_release, chosen) if outcome is not None]


def _try_release(holder: Holder) -> Released | None:
    start = time.perf_counter()
    try:
        if not present(holder):
            return None
        release(holder)
    except Exception as error:
        # As text: the exception's traceback has frames that hold what was to be released.
        text = f"{type(error).__name__}: {error}"
        return Released(holder.name, time.perf_counter() - start, text)
    return Released(holder.name, time.perf_counter() - start)
