"""What a fresh process writes goes where this one writes."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_PIECE = 2**16  # bytes read at once


@contextmanager
def passed_on() -> Iterator[tuple[int, int]]:
    """Have two descriptors for another process, whose output is that of ``sys.stdout`` and ``sys.stderr``.

    Where these are real files, the process gets them; so it is too while pytest captures descriptors. A notebook, or
    whatever else stands there and has no file, is written to by a thread. All has been written when the block is left,
    once the process has ended.
    """
    with ExitStack() as stack:
        pump = _Pump()
        descriptors = [_descriptor(stream, pump, stack) for stream in (sys.stdout, sys.stderr)]
        with pump.running():
            yield descriptors[0], descriptors[1]


def _descriptor(stream: Any, pump: _Pump, stack: ExitStack) -> int:
    if stream is None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, descriptor)
        return descriptor
    with suppress(Exception):  # one that is closed, say
        stream.flush()
    # Jupyter's streams tell a file, too: the one that they are not.
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):
            return stream.fileno()
    ours, theirs = os.pipe()
    stack.callback(os.close, theirs)
    pump.add(ours, stream)
    return theirs


class _Pump:
    """Writes to streams what comes out of pipes."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[Any, codecs.IncrementalDecoder]] = {}

    def add(self, pipe: int, stream: Any) -> None:
        """Write to a stream what comes out of a pipe."""
        self._streams[pipe] = stream, codecs.getincrementaldecoder("utf-8")("replace")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pump while something happens, and then what is left."""
        if not self._streams:
            yield
            return
        stopped, stop = os.pipe()
        thread = threading.Thread(target=self._run, args=(stopped,), name="vllm-cleanup-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(stop)
            thread.join()
            for descriptor in (stopped, *self._streams):
                os.close(descriptor)

    def _run(self, stopped: int) -> None:
        poll = select.poll()
        for descriptor in (stopped, *self._streams):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if stopped in ready:
                break
            for descriptor in ready:
                self._write(descriptor, os.read(descriptor, _PIECE))
        for descriptor in self._streams:
            # No more than a pipe holds: whoever still writes then has nothing to do with the process.
            left = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while left > 0:
                    piece = os.read(descriptor, left)
                    self._write(descriptor, piece)
                    left -= len(piece)
            self._write(descriptor, b"")

    def _write(self, descriptor: int, piece: bytes) -> None:
        stream, decoder = self._streams[descriptor]
        # Whatever is wrong with a stream, the process must not wait because nobody reads.
        with suppress(Exception):
            stream.write(decoder.decode(piece, final=not piece))
            stream.flush()
