"""What may legitimately differ between two readings: engines that live on, and costs that are paid once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .reading import HOST, Reading
from .units import GIB, MIB

CONTEXT_LIMIT = 2 * GIB
"""No first use of a device is granted more than this. Contexts of 555 to 843 MB were reported; with kernels,
cuBLAS and NCCL in use, 761 MiB were measured on an H200."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Bytes by which engines that live on, or that left, change what is expected. Negative: they left.

    The figures do not overlap, so that each byte is named once.

    Attributes:
        allocated: In the allocator of this process.
        children: In our other processes.
        below: In this process, below the allocator (CUDA graphs, communicators).
        host: In host memory, in this process and its children, where the engines run on the CPU.
    """

    allocated: int = 0
    children: int = 0
    below: int = 0
    host: int = 0

    def plus(self, other: Adjustment) -> Adjustment:
        """Both adjustments together."""
        return Adjustment(
            allocated=self.allocated + other.allocated,
            children=self.children + other.children,
            below=self.below + other.below,
            host=self.host + other.host,
        )


@dataclass(frozen=True, slots=True)
class Grants:
    """Bytes that a process may keep without having leaked them.

    Attributes:
        context: What this process's context on the device was measured to take (see ``context_bytes``);
            None before it was measured.
        overhead: What one test may add below or inside the allocator without a tensor to show for it:
            kernels are loaded at first use and stay loaded, and free blocks in use by halves stay reserved.
        host: One-off costs in host memory of the first engine (imports, compiled code).
        working: By how much engines that live on may grow by working (workspaces, sampler buffers, kernels).
    """

    context: int | None = None
    overhead: int = 512 * MIB
    host: int = 0
    working: Adjustment = Adjustment()

    @property
    def known_context(self) -> int:
        """The measured context within the limit; 0 before it was measured."""
        return min(self.context or 0, CONTEXT_LIMIT)

    @property
    def first_use(self) -> int:
        """What the first use of a device by this process may take."""
        return CONTEXT_LIMIT if self.context is None else self.known_context + self.overhead


def context_bytes(reading: Reading) -> int | None:
    """Return what this process holds on the device below its allocator; None if that cannot be had."""
    if reading.own is None or reading.reserved is None:
        return None
    return max(0, reading.own - reading.reserved)


def growth_of(pids: Collection[int], baseline: Reading, after: Reading) -> Adjustment:
    """By how much some of our processes grew, as an expectation for the engines that they belong to.

    An engine that lives on loads kernels and grows its caches whenever it works; that is no leak of the test
    that made it work. Processes that are missing from a reading count as holding nothing in it, unknown
    sizes as no growth.
    """
    sizes = []
    for reading in (baseline, after):
        uses = {use.pid: use.bytes for use in reading.processes or () if use.pid in pids and use.ours}
        if None in uses.values() or reading.processes is None:
            return Adjustment()
        sizes.append(sum(size for size in uses.values() if size is not None))
    growth = sizes[1] - sizes[0]
    return Adjustment(host=growth) if after.device == HOST else Adjustment(children=growth)
