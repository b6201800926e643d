"""What the inner tests do with engines. What kind of engine it is, the outer test decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from chaos_diary import note

MODEL = os.environ["CHAOS_MODEL"]
CORRUPT = os.environ["CHAOS_CORRUPT_MODEL"]
ENGINE = json.loads(os.environ["CHAOS_ENGINE"])
IN_PROCESS = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
WITH_WORKER = {} if IN_PROCESS else {"distributed_executor_backend": "mp"}

# Functions of vLLM that the main thread is in while an engine is built: in this process, and in a child process.
BUILDING = ("load_model", "wait_for_engine_startup")
# Likewise while its model runs for the first time, in this process.
WARMING_UP = ("warming_up_model", "profile_run", "_dummy_run")
# Likewise of this project, while one is closed.
CLOSING = ("close_engine", "close_handle")

_PROMPT = "The engine gives its memory back"


def build(make, **arguments):
    """Build an engine with an ``LLM`` or a ``vllm_runner``, use it, and note that it works."""
    engine = make(MODEL, **{**ENGINE, **arguments})
    assert generate(engine)
    note("engine")
    return engine


def generate(engine):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    return getattr(engine, "llm", engine).generate([_PROMPT], greedy, use_tqdm=False)


def core(besides=()):
    """Return the process of the engine's core."""
    return _titled(psutil.Process().children(), "VLLM::EngineCore", besides)[0]


def worker():
    """Return the process of the engine's only worker."""
    return _titled(core().children(), "VLLM::Worker")[0]


def has_core():
    return bool(_titled(psutil.Process().children(), "VLLM::EngineCore"))


def has_worker():
    return bool(_titled(psutil.Process().children(recursive=True), "VLLM::Worker"))


def inside(functions):
    """Return a condition: the main thread is inside one of these functions."""
    main = threading.main_thread().ident

    def condition():
        frame = sys._current_frames().get(main)
        while frame is not None:
            if frame.f_code.co_name in functions:
                return True
            frame = frame.f_back
        return False

    return condition


def as_soon_as(condition, action):
    """Have a thread wait until a condition is met, and then act."""

    def wait():
        while not condition():
            time.sleep(0.005)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def start_bystander():
    """Start a process that looks like an engine and is none, and wait until it has its title."""
    started = subprocess.Popen([sys.executable, str(Path(__file__).with_name("bystander.py"))])
    while not Path(os.environ["CHAOS_BYSTANDERS"], str(started.pid)).exists():
        time.sleep(0.01)
    return started.pid


def _titled(processes, title, besides=()):
    found = []
    for process in processes:
        try:
            if process.pid not in besides and process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                found.append(process)
        except psutil.Error:
            continue
    return found
