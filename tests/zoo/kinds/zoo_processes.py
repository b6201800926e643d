"""Programs and functions that take memory in a process of their own."""

from __future__ import annotations

import sys

from zoo_expect import DEVICE, SIZE

_TAKE = (
    f"import torch; kept = torch.ones({SIZE}, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()"
    if DEVICE == "cuda"
    else f"kept = bytearray(b'x') * {SIZE}"
)
_WAIT = "import sys; print('up', flush=True); sys.stdin.read()"

SERVER = [sys.executable, "-c", f"{_TAKE}; {_WAIT}"]
"""Takes memory, says that it is up, and lives until its standard input is closed."""

JOB = [sys.executable, "-c", f"{_TAKE}; import sys, time; print('up', flush=True); time.sleep(float(sys.argv[1]))"]
"""Takes memory, says that it is up, and ends after as many seconds as it is told."""


def serve(ready, stop):
    """Do what ``SERVER`` does, as the target of a multiprocessing.Process."""
    kept: object = None
    if DEVICE == "cuda":
        import torch

        kept = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    else:
        kept = bytearray(b"x") * SIZE
    ready.set()
    stop.wait(600)
    del kept
