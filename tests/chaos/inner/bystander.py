"""A process of the user's that looks like an engine and is none. Writes down who it is, and every signal it gets."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import setproctitle

_LIFETIME = 900  # seconds, should nobody end it


def main():
    received = []
    file = Path(os.environ["CHAOS_BYSTANDERS"], str(os.getpid()))
    me = {"pid": os.getpid(), "created": psutil.Process().create_time(), "received": received}

    def write():
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(me))
        unfinished.replace(file)

    def receive(number, _frame):
        received.append(signal.Signals(number).name)
        write()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, receive)
    setproctitle.setproctitle("VLLM::EngineCore")
    write()
    end = time.monotonic() + _LIFETIME
    while time.monotonic() < end:
        time.sleep(1)


main()
