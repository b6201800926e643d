"""The books of torch's CUDA allocator: which blocks it has given out, from which pools, and, if recorded, to whom.

The books are dictionaries, described at ``torch.cuda.memory._snapshot``. Nothing here starts CUDA or imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import wrapt

from pytest_vllm_cleanup.diagnosis import places
from pytest_vllm_cleanup.guard import guarded
from pytest_vllm_cleanup.memory.meters.torch_allocator import initialised_torch

Blocks: TypeAlias = dict[str, dict[int, int]]
"""By device: the address and the size of each block that is given out."""
Segments: TypeAlias = Sequence[dict[str, Any]]

_MAX_ENTRIES = 50_000  # of the history of a device, each some hundred bytes
_LONGEST_STACK = 8
_LONGEST_NAME = 150  # characters of a file name, of which most file systems allow 255


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory that the allocator keeps for one purpose, as for CUDA graphs or a ``torch.cuda.MemPool``.

    Attributes:
        device: where it is.
        id: torch's number of it, ``(0, 0)`` for the one that serves everybody.
        reserved: bytes taken from the driver.
        active: bytes of it that are given out.
    """

    device: str
    id: tuple[int, int]
    reserved: int
    active: int


@dataclass(frozen=True, slots=True)
class Books:
    """What the allocators of this process have written down.

    Attributes:
        blocks: by device, the blocks that are given out; a device is missing if nothing is written down for it.
        pools: the private pools, by device the biggest first.
        pinned: bytes of pinned host memory that are given out.
    """

    blocks: Blocks = field(default_factory=dict)
    pools: list[Pool] = field(default_factory=list)
    pinned: int = 0


class _Recording:
    """Whether allocations are to be recorded, in which process, and whether it was we who switched that on."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.entries = _MAX_ENTRIES
        self.ours = False
        self.hooked = False

    def when_imported(self, torch: Any) -> None:
        if self.pid == os.getpid():
            with guarded("recording where GPU memory is allocated"):
                # At once if CUDA is up, else as soon as it is. It never starts CUDA.
                torch.cuda._lazy_call(self.begin)

    def begin(self) -> None:
        # CUDA may come up long after the run was over, or in a forked child.
        if self.pid != os.getpid() or self.ours:
            return
        with guarded("recording where GPU memory is allocated"):
            import torch

            if not torch._C._cuda_isHistoryEnabled():  # else the user's own, with the user's limits
                # Python's frames only: looking up those of C++ takes seconds.
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=self.entries)
                self.ours = True


_recording = _Recording()


def start_recording(max_entries: int = _MAX_ENTRIES) -> None:
    """Have torch note down where each block of GPU memory is allocated, as soon as CUDA is up in this process.

    Costs some microseconds for each allocation. A recording of the user's own is left as it is.

    Args:
        max_entries: how many allocations and frees the history in torch's snapshot reaches back.
    """
    _recording.pid, _recording.entries = os.getpid(), max_entries
    if initialised_torch() is not None:
        _recording.begin()
    elif not _recording.hooked:
        _recording.hooked = True
        wrapt.register_post_import_hook(_recording.when_imported, "torch")


def stop_recording() -> None:
    """Stop it again, and forget what was recorded. Only what ``start_recording`` started."""
    _recording.pid = None
    torch = initialised_torch()
    if _recording.ours and torch is not None:
        _recording.ours = False
        torch.cuda.memory._record_memory_history(enabled=None)


def is_recording() -> bool:
    """Whether torch records allocations in this process, for us or for the user."""
    torch = initialised_torch()
    return torch is not None and bool(torch._C._cuda_isHistoryEnabled())


def segments() -> Segments | None:
    """Return what the allocator took from the driver and what it did with it; None where there are no books."""
    torch = initialised_torch()
    if torch is None:
        return None
    try:
        try:
            found: Segments = torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:  # older releases of torch
            found = torch.cuda.memory_snapshot()
    except RuntimeError:  # a pluggable allocator keeps none; after a device-side assert every call may fail
        return None
    return found


def read(devices: Collection[str]) -> Books:
    """Read the books of some devices."""
    torch = initialised_torch()
    cuda = [device for device in devices if device.startswith("cuda")]
    if torch is None or not cuda:
        return Books()
    found = segments()
    if found is None:
        return Books()
    return Books(blocks_in(found, cuda), [pool for device in cuda for pool in pools_in(found, device)], pinned(torch))


def blocks_in(books: Iterable[dict[str, Any]], devices: Collection[str]) -> Blocks:
    """Return the blocks of some devices that are given out."""
    found: Blocks = {device: {} for device in devices}
    for segment in books:
        blocks = found.get(f"cuda:{segment['device']}")
        if blocks is not None:
            blocks.update((block["address"], block["size"]) for block in segment["blocks"] if _is_active(block))
    return found


def pools_in(books: Iterable[dict[str, Any]], device: str) -> list[Pool]:
    """Return the private pools on a device, biggest first."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for segment in books:
        first, second = segment.get("segment_pool_id", (0, 0))
        if f"cuda:{segment['device']}" == device and (first or second):
            size = sizes.setdefault((first, second), [0, 0])
            size[0] += segment["total_size"]
            size[1] += sum(block["size"] for block in segment["blocks"] if _is_active(block))
    found = [Pool(device, number, reserved, active) for number, (reserved, active) in sizes.items()]
    return sorted(found, key=lambda pool: (-pool.reserved, pool.id))


def pinned(torch: Any) -> int:
    """Return the bytes of pinned host memory that torch has given out, 0 where this release does not count them."""
    count = getattr(torch._C, "_cuda_hostMemoryStats", None)
    figures = {} if count is None else count()
    for name in ("active_bytes", "allocated_bytes"):
        figure = figures.get(name, {})
        figure = figure.get("all", figure)  # as the allocator of the device counts
        if "current" in figure:
            return int(figure["current"])
    return 0


def recorded() -> Segments:
    """Return the books with the stacks in them; empty if nothing is recorded."""
    return (segments() or ()) if is_recording() else ()


def stack_of(address: int, device: str) -> tuple[str, ...]:
    """Return where a live block was allocated, outermost first, at most 8 lines; () where that was not recorded."""
    return stack_in(recorded(), address, device)


def stack_in(books: Iterable[dict[str, Any]], address: int, device: str) -> tuple[str, ...]:
    """Return the same from given books."""
    for segment in books:
        begin = segment["address"]
        if f"cuda:{segment['device']}" == device and begin <= address < begin + segment["total_size"]:
            for block in segment["blocks"]:
                if block["address"] == address and _is_active(block):
                    return shortened(block.get("frames", ()))
    return ()


def shortened(frames: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the lines of a stack that tell most: those of the user's code, and the innermost ones.

    Args:
        frames: as torch gives them, innermost first.
    """
    stack = [frame for frame in reversed(frames) if not frame["filename"].startswith(places.OURS)]
    users = [number for number, frame in enumerate(stack) if _is_users(frame["filename"])]
    if users:  # before them, it is the test runner's
        stack = stack[users[0] :]
        users = [number - users[0] for number in users]
    # The two innermost always: they say what was allocated.
    chosen = set(range(max(0, len(stack) - 2), len(stack)))
    for number in (*reversed(users), *reversed(range(len(stack)))):
        if len(chosen) == _LONGEST_STACK:
            break
        chosen.add(number)
    return tuple(_line(stack[number]) for number in sorted(chosen))


def write_snapshot(folder: Path, name: str) -> Path:
    """Write torch's snapshot of its books, with the recorded history, for https://pytorch.org/memory_viz.

    Args:
        folder: where; it is made if it is missing.
        name: what it is about, such as the id of a test.

    Returns:
        The file. One of the same name is replaced.

    Raises:
        RuntimeError: CUDA is not up in this process, or the allocator keeps no books.
        OSError: the file could not be written.
    """
    torch = initialised_torch()
    if torch is None:
        raise RuntimeError("CUDA is not up in this process, so there are no allocations to write down")
    folder.mkdir(parents=True, exist_ok=True)
    # The end of a test's id tells more than the beginning.
    file = folder / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '_', name)[-_LONGEST_NAME:].lstrip('_.')}.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    return file


def _is_active(block: dict[str, Any]) -> bool:
    # Also one that waits for another stream to end with it.
    return bool(block["state"] != "inactive")


def _is_users(path: str) -> bool:
    return Path(path).is_absolute() and places.is_users(path)


def _line(frame: dict[str, Any]) -> str:
    path, here = frame["filename"], str(Path.cwd()) + os.sep
    return f"{path.removeprefix(here)}:{frame['line']} {frame['name']}"
