"""Tells the other tenant of the device what to do."""

from __future__ import annotations

import os
import socket


def take(size):
    """Have the other tenant take so many bytes; 0: give all back."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(os.environ["ZOO_TENANT"])
        door.sendall(str(size).encode())
        assert door.recv(64) == b"done"
