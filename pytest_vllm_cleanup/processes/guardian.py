"""The helper process: it outlives a pytest that is killed, ends what that one's engines have left, and goes.

It is told over a socket which processes belong to which engine, looks once a second what these have started, and
answers when it is asked. It has a session of its own, so that no Ctrl-C and no closed terminal reaches it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from pytest_vllm_cleanup.processes import reap, tree
from pytest_vllm_cleanup.processes.proc import ProcessId

_LOOK = 1.0  # seconds between two looks at what the engines have started
_CHECK = 0.25  # seconds between two looks at the parent, where the kernel cannot tell of its end
_GRACE = 5.0  # seconds that engines have after SIGTERM
_GONE = 60.0  # seconds to wait for what was killed


class Guardian:
    """Knows the processes of each engine.

    Args:
        connection: the socket to the process that builds the engines.
        parent: the number of that process.
    """

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._engines: dict[int, set[ProcessId]] = {}
        self._unread = b""
        self._dismissed = False

    def serve(self) -> bool:
        """Listen until the parent is gone.

        Returns:
            whether it has gone without a farewell, so that its engines are to be ended.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        end = _watch(self._parent)
        if end is not None:
            poll.register(end, select.POLLIN)
        next_look = time.monotonic() + _LOOK
        while not self._dismissed:
            if os.getppid() != self._parent:
                return self._hear_the_rest()
            timeout = _LOOK if self._engines else None
            if end is None:
                timeout = _CHECK
            for descriptor, _ in poll.poll(None if timeout is None else timeout * 1000):
                if descriptor == end:
                    return self._hear_the_rest()
                # An end of the connection alone means nothing: a test may close all descriptors, and live on.
                if descriptor == self._connection.fileno() and not self._receive():
                    poll.unregister(self._connection)
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _LOOK
        return False

    def end_all(self) -> list[str]:
        """End the processes of all engines: ask once, wait, kill.

        Returns:
            what was ended, one phrase a process.
        """
        family = reap.Family(set().union(*self._engines.values()))
        described = [tree.describe([process]) for process in sorted(family())]
        deadline = time.monotonic() + _GONE
        left = family.terminate(_GRACE)
        while left and time.monotonic() < deadline:
            reap.send_all(left, signal.SIGKILL)
            left = reap.wait(family, _LOOK)
        return described

    def _hear_the_rest(self) -> bool:
        # The parent may have died while this process was still starting, or in the middle of its last words.
        self._connection.setblocking(False)
        while self._receive():
            pass
        return not self._dismissed

    def _receive(self) -> bool:
        try:
            data = self._connection.recv(65536)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, message: dict[str, Any]) -> None:
        engine: int = message.get("engine", 0)
        if message["say"] == "add":
            self._engines.setdefault(engine, set()).update(ProcessId(*process) for process in message["processes"])
        elif message["say"] == "tell":
            self._look()
            known = [[process.pid, process.started] for process in self._engines.get(engine, ())]
            with suppress(OSError):
                self._connection.sendall(json.dumps(known).encode() + b"\n")
        elif message["say"] == "forget":
            self._engines.pop(engine, None)
        else:
            self._dismissed = True

    def _look(self) -> None:
        for known in self._engines.values():
            running = tree.family(known)
            known.clear()
            known.update(running)


def _watch(parent: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends, None if the kernel has no such thing."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None


def main(descriptor: int, parent: int) -> None:
    """Guard the engines of one process.

    Args:
        descriptor: number of the socket's file descriptor.
        parent: number of the process that builds the engines.
    """
    # Whoever ends all of a job's processes at once asks politely first; this one is needed until the others are gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guardian = Guardian(socket.socket(fileno=descriptor), parent)
    if guardian.serve() and (ended := guardian.end_all()):
        with suppress(OSError):
            text = f"process {parent} is gone without having closed its engines; ended {', '.join(ended)}"
            print(f"\npytest-vllm-cleanup: {text}", file=sys.stderr, flush=True)
