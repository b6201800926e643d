"""Messages between two processes over a socket: a name and plain data, and descriptors of files beside them."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = tuple[str, Any]

_HEADER = struct.Struct("!Q")
_PIECE = 2**20  # bytes read at once
_MOST_DESCRIPTORS = 8
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Wire:
    """One end of the connection.

    Args:
        connection: a connected Unix socket, which belongs to the wire from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._owner = os.getpid()
        self._unread = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket, to be waited for."""
        return self._connection.fileno()

    def send(self, name: str, data: Any = None, descriptors: Sequence[int] = ()) -> None:
        """Send a message; does nothing in a forked child, which is not the one that was asked.

        Raises:
            OSError: the other end is gone.
        """
        if os.getpid() != self._owner:
            return
        body = pickle.dumps((name, data), protocol=pickle.HIGHEST_PROTOCOL)
        if descriptors:
            socket.send_fds(self._connection, [_HEADER.pack(len(body))], list(descriptors))
        else:
            self._connection.sendall(_HEADER.pack(len(body)))
        self._connection.sendall(body)

    def read(self) -> bool:
        """Wait for bytes and read what is there.

        Returns:
            whether there will be more; not if the other end is gone.
        """
        try:
            piece, descriptors, _, _ = socket.recv_fds(
                self._connection, _PIECE, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        self._unread += piece
        self._descriptors += descriptors
        return bool(piece)

    def next(self) -> Message | None:
        """Return the next message that has been read whole, None if there is none."""
        if len(self._unread) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._unread)
        end = _HEADER.size + length
        if len(self._unread) < end:
            return None
        name, data = pickle.loads(self._unread[_HEADER.size : end])
        del self._unread[:end]
        return name, data

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            EOFError: the other end is gone.
        """
        while (message := self.next()) is None:
            if not self.read():
                raise EOFError("the other end of the connection is gone")
        return message

    def take_descriptors(self) -> list[int]:
        """Return the descriptors that have come since the last call; they are the caller's to close."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Close this end."""
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        self._connection.close()


def plain(value: Any) -> Any:
    """Return a value as lists, dictionaries, tuples, sets, text and numbers; anything else in it as its text.

    So the other process needs none of the modules whose objects are in there.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(plain(item) for item in value)
    if kind is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, str):  # such as a member of an enumeration
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as problem:
        return f"<{type(value).__name__} object whose text cannot be had: {type(problem).__name__}>"
