"""Ports of its own for each worker, so that engines which start together do not pick the same one.

vLLM picks a port, lets it go, and binds it much later. With ``VLLM_PORT`` it counts up from there; without, the system
gives any. torch.distributed reads ``MASTER_PORT``, vLLM's data parallel ranks ``VLLM_DP_MASTER_PORT``, of which vLLM
keeps ten ports free (``vllm.utils.network_utils``).
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout
from packaging.version import Version

from .folder import file_name, lock_folder

# Below what Linux gives by itself (32768 on), and beside torch's and vLLM's own 29500 and 29550.
FIRST, BLOCK, BLOCKS = 20000, 100, 90
_MASTER, _DATA_PARALLEL = 70, 80
# Older ones ask for five different ports from VLLM_PORT on, and get the same one for ever.
_COUNTS_UP = Version("0.18.1")


class Ports:
    """A range of ports that no other process of this user has, as long as this object or its process lives.

    Attributes:
        first: the lowest.
    """

    def __init__(self, first: int, lock: BaseFileLock) -> None:
        self.first = first
        self._lock = lock  # which its end lets go

    def environment(self, vllm: Version | None) -> dict[str, str]:
        """Return the variables that lead everybody into the range.

        Args:
            vllm: the installed release, None if there is none.
        """
        found = {
            "MASTER_PORT": str(self.first + _MASTER),
            "VLLM_DP_MASTER_PORT": str(self.first + _DATA_PARALLEL),
        }
        if vllm is None or vllm >= _COUNTS_UP:
            found["VLLM_PORT"] = str(self.first)
        return found


def reserve(folder: Path | None = None) -> Ports | None:
    """Take a range that is free; None if all are taken.

    Args:
        folder: where the locks are.
    """
    folder = lock_folder() if folder is None else folder
    start = os.getuid() % BLOCKS  # other users look elsewhere first: their locks are not seen here
    for step in range(BLOCKS):
        first = FIRST + (start + step) % BLOCKS * BLOCK
        lock = FileLock(folder / file_name("ports", str(first)), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return Ports(first, lock)
    return None
