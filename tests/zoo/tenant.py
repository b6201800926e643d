"""A process that stands for another tenant of the GPU: nobody's child in the inner runs, and it does as it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import socket, sys
import torch
kept = []
with socket.socket(socket.AF_UNIX) as door:
    door.bind(sys.argv[1])
    door.listen()
    torch.ones(1, device="cuda").item()  # its context and its kernels are there from now on
    print("up", flush=True)
    while True:
        caller, _ = door.accept()
        with caller:
            size = int(caller.recv(64))
            if size:
                kept.append(torch.ones(size, dtype=torch.uint8, device="cuda"))
                torch.cuda.synchronize()
            else:
                kept.clear()
                torch.cuda.empty_cache()
            caller.sendall(b"done")
"""


class Tenant:
    """Takes memory of the device and gives it back, as callers of its socket ask.

    Args:
        address: path of its socket. It is told how many bytes to take, 0 for giving all back, and answers when done.
    """

    def __init__(self, address: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(address)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the other tenant did not start: exit status {self._process.wait()}")

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
