"""Memory readings on demand, and the highest since a start."""

from __future__ import annotations

import threading
from types import TracebackType

from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.memory import HOST, Gauge, Reading, Snapshot

_INTERVAL = 0.05
_HOST_INTERVAL = 0.5  # the kernel walks page tables for a reading of the host
_FIGURES = ("used", "own", "children", "allocated", "reserved")


class GpuMemory:
    """Reads memory now, and watches its peak in a thread from the first use of a ``with`` block on.

    Args:
        gauge: what to read with, None for the gauge of this process.
    """

    def __init__(self, gauge: Gauge | None = None) -> None:
        self._gauge = current_gauge() if gauge is None else gauge
        self._peaks: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-cleanup-peak", daemon=True)

    def read(self) -> Snapshot:
        """Return the readings of all devices by name, in bytes; a figure that cannot be had is None."""
        snapshot = self._gauge.read()
        self._note(snapshot)
        return snapshot

    def device(self, name: str | None = None) -> Reading:
        """Return the reading of one device, of the first if no name is given.

        Raises:
            LookupError: there is no such device; the text names those that can be measured.
        """
        snapshot = self.read()
        name = next(iter(snapshot), "") if name is None else name
        if name not in snapshot:
            known = ", ".join(snapshot) or f"none ({self._gauge.reason})"
            raise LookupError(f"device {name!r} cannot be measured; these can: {known}")
        return snapshot[name]

    def peak(self, figure: str = "used", device: str | None = None) -> int | None:
        """Return the highest value of a figure since the start, in bytes; None if it could never be read.

        Read every 50 ms (the host every 0.5 s), so a shorter peak can be missed.

        Raises:
            ValueError: there is no such figure; the text names the valid ones.
        """
        if figure not in _FIGURES:
            raise ValueError(f"figure {figure!r}: expected one of {', '.join(_FIGURES)}")
        reading = self.device(device)
        with self._lock:
            return self._peaks.get(reading.device, {}).get(figure)

    def __enter__(self) -> GpuMemory:
        self.read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_HOST_INTERVAL if HOST in self._peaks else _INTERVAL):
            self._note(self._gauge.read())

    def _note(self, snapshot: Snapshot) -> None:
        with self._lock:
            for name, reading in snapshot.items():
                peaks = self._peaks.setdefault(name, {})
                for figure in _FIGURES:
                    value = getattr(reading, figure)
                    if value is not None:
                        peaks[figure] = max(value, peaks.get(figure, 0))
