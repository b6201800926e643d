"""Host memory of this process and its descendants, for vLLM's CPU platform."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import psutil

from ..reading import HOST, ProcessUse, Reading
from .processes import is_helper


class HostMeter:
    """Reads the memory that processes have written: their anonymous and shared memory, in memory or swapped out.

    Pages that a forked child shares with its parent are divided between them, so that each counts once in the sum, and
    a fork changes nothing. Pages of mapped files do not count, as in the unique set size (USS) they do: those of
    torch's libraries are private or shared depending on whether another program runs torch, and the USS of an idle
    process was seen to move by 150 MiB for that. Nor do they while they wait to be written to disk, as those of a torch
    that has just been installed do, which the kernel calls dirty for half a minute (up to 64 MiB were seen). Before
    Linux 5.4 such pages do count, and shared ones for nobody: while a forked child lives, what it shares is not seen.
    Outside Linux it is the USS after all.

    The kernel walks the page tables for it: some milliseconds for a process with torch, more for a large one.
    Free heap memory is handed back first; the C allocator would keep it, and it would look like a leak.
    """

    name = "host"
    reason = ""

    def available(self) -> bool:
        """Whether the machine gives the figure for this very process."""
        return bool(self.read(frozenset()))

    def read(self, ours: frozenset[int]) -> dict[str, Reading]:
        """Read the device ``"host"``; see ``Meter``."""
        trim_heap()
        try:
            me = psutil.Process()
            # Children first: a process that starts meanwhile is then missing, not counted as a stranger.
            children = {child.pid: child for child in me.children(recursive=True)}
            own = _use(me)
            total = psutil.virtual_memory().total
        except (psutil.Error, OSError, AttributeError) as error:
            self.reason = f"the memory of this process cannot be read ({type(error).__name__}: {error})"
            return {}
        for pid in ours - children.keys() - {me.pid}:
            try:
                children[pid] = psutil.Process(pid)
            except psutil.Error:
                continue
        uses = [use for child in children.values() if (use := _use(child)) is not None]
        processes = (own, *uses) if own is not None else tuple(uses)
        own_bytes = None if own is None else own.bytes
        child_bytes = _total([use.bytes for use in uses])
        self.reason = "" if own_bytes is not None else "the memory of this process may not be read"
        return {
            HOST: Reading(
                device=HOST,
                meters=(self.name,),
                used=_total([own_bytes, child_bytes]),
                total=total,
                own=own_bytes,
                children=child_bytes,
                processes=processes,
            )
        }


def trim_heap() -> None:
    """Hand free heap memory of this process back to the machine, where the C allocator has a call for it."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return
    for name, arguments in (
        ("malloc_trim", (0,)),  # glibc
        ("MallocExtension_ReleaseFreeMemory", ()),  # tcmalloc, which vLLM advises to preload
        ("mallctl", (b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))),  # jemalloc, all arenas
    ):
        function = getattr(library, name, None)
        if function is not None:
            function(*arguments)


def _use(process: Any) -> ProcessUse | None:
    """Return what a process holds; None if it has ended, or is a helper of the session."""
    pid: int = process.pid
    try:
        if pid != os.getpid() and is_helper(process.cmdline()):
            return None
        name: str = process.name()
        size: int | None = _written_bytes(process)
    except psutil.NoSuchProcess:  # ended, or a zombie, whose memory is gone
        return None
    except psutil.AccessDenied:
        return ProcessUse(pid, None, None, ours=True)
    return ProcessUse(pid, size, name, ours=True)


def _written_bytes(process: Any) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return int(process.memory_full_info().uss)
    except PermissionError as error:
        raise psutil.AccessDenied(process.pid) from error
    except ProcessLookupError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    fields = (line.split() for line in lines[1:])
    figures = {name.rstrip(":"): int(kibibytes) * 1024 for name, kibibytes, *_ in fields}
    if "Pss_Anon" not in figures:
        return figures.get("Private_Dirty", 0) + figures.get("Swap", 0)  # both are missing for a zombie
    # What an allocator has handed back, and the kernel not yet taken, is not divided between a fork's processes.
    pages, handed_back = figures["Anonymous"], figures["LazyFree"]
    held = figures["Pss_Anon"] * (pages - handed_back) // pages if pages else 0
    return held + figures["Pss_Shmem"] + figures["SwapPss"]


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
