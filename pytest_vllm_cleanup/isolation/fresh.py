"""A fresh interpreter, from the inside: what its first line calls. It imports little until it is told what to do."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from pytest_vllm_cleanup.isolation.wire import Wire


def main(connection: int, faults: int) -> None:
    """Wait for an order, and carry it out.

    Args:
        connection: descriptor of the socket to the parent process.
        faults: descriptor of the file that gets the stacks of all threads when this process crashes.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # by which the parent has it end in order
    wire = Wire(socket.socket(fileno=connection))
    os.register_at_fork(after_in_child=wire.close)  # a forked child that kept it open would hide the end of this one
    faulthandler.enable(faults)  # to the very end: exiting may crash or hang as well
    try:
        name, order = wire.receive()
        if name == "warm":
            warm_up(order["modules"], order["path"])
            wire.send("warm")
            name, order = wire.receive()
    except (EOFError, OSError):  # nobody needs it
        return
    settle_in(order)
    if name == "test":
        from pytest_vllm_cleanup.isolation.child import run

        status = run(order, wire, faults)
    else:
        from pytest_vllm_cleanup.isolation.callee import run_function

        status = run_function(order, wire)
    sys.exit(status)


def warm_up(modules: list[str], path: list[str]) -> None:
    """Import modules ahead, from these folders. Whatever is wrong with them, those who need them will say so."""
    sys.path[:] = path
    collects = gc.isenabled()
    gc.disable()  # a fifth of the time that vLLM takes, and there is hardly any garbage
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    if collects:
        gc.enable()


def settle_in(order: dict[str, Any]) -> None:
    """Become like the parent is now: its environment, its folders to import from, its command line, its folder."""
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.path[:] = order["path"]
    sys.argv[:] = order["argv"]
    os.chdir(order["folder"])
