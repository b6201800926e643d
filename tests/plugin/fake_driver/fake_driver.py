"""Plugin of inner runs on fake GPUs: memory that processes hold, engines in child processes, and a diary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from pynvml import runs  # noqa: F401 - for tests

FOLDER = Path(os.environ["FAKE_GPUS"])
MIB = 1 << 20


def devices():
    """The folders of the visible GPUs, found as CUDA would find them."""
    cards = sorted(FOLDER.iterdir())
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(cards)))))
    found = []
    for text in named.split(","):
        found += [cards[int(text)]] if text.isdecimal() else [c for c in cards if c.name.partition("_")[2] == text]
    return found


def holds(pid):
    return any((card / str(pid)).exists() for card in FOLDER.iterdir())


def pytest_configure():
    from pytest_vllm_cleanup.memory.meters import nvml, processes, torch_allocator

    nvml.uses_driver = processes.uses_driver = holds
    torch_allocator.holds_context = processes.holds_context = lambda: holds(os.getpid())


def note(**facts):
    """Write down what happens, with the time."""
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "worker": worker(), **facts})
    with (FOLDER.parent / "diary").open("a") as diary:
        diary.write(line + "\n")


def worker():
    return os.environ.get("PYTEST_XDIST_WORKER", "")


def meet(workers=2):
    """Have each worker wait, the first time, until all of them are here; not for ever, as in a run outside xdist."""
    places = FOLDER.parent / "meeting"
    places.mkdir(exist_ok=True)
    (places / worker()).touch() if worker() else None
    end = time.monotonic() + (10 if worker() else 0)
    while len(list(places.iterdir())) < workers and time.monotonic() < end:
        time.sleep(0.01)


PROGRAM = """
import os, sys, time
from pathlib import Path
time.sleep(float(sys.argv[2]))
files = [Path(card) / str(os.getpid()) for card in sys.argv[3:]]
for file in files:
    file.write_text(sys.argv[1])
print("up", flush=True)
time.sleep(600)
"""


def start(size=1024 * MIB, loading=0.0):
    """Start a process that holds memory on all visible GPUs."""
    command = [sys.executable, "-S", "-E", "-c", PROGRAM, str(size), str(loading), *map(str, devices())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


class Engine:
    """What the plugin sees of an engine in a child process."""

    def __init__(self, size=1024 * MIB, loading=0.0):
        from pytest_vllm_cleanup.engines import children
        from pytest_vllm_cleanup.engines.registry import State, registry

        self.handle = registry.begin("LLMEngine")
        with ExitStack() as turn:
            registry.wait_to_start(self.handle, turn)
            registry.tell("before_build", self.handle)
            note(event="starts", on=[card.name for card in devices()])
            with children.recorded(self.handle):
                self.process = start(size, loading)
            self.handle.state, self.handle.in_process = State.LIVE, False
            note(event="is up", on=[card.name for card in devices()])
            registry.tell("after_build", self.handle)

    def close(self):
        from pytest_vllm_cleanup.engines.close import close_handle

        self.process.terminate()  # as vLLM's own shutdown would
        self.process.wait()
        close_handle(self.handle)
        self.process.stdout.close()
