"""What a fresh process writes reaches streams that are no files, and nobody is waited for who goes on writing."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import threading
import time

from pytest_vllm_cleanup.isolation.output import passed_on

TALKS = "import os\nwhile True: os.write(1, b'x' * 2**18)"


def test_all_that_was_written_is_there_when_the_process_has_ended(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = "import sys; print('\u00e4' * 300_000); print('error', file=sys.stderr)"
    with passed_on() as (stdout, stderr):
        environ = {"PYTHONIOENCODING": "utf-8"}
        subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=stderr, env=environ, check=True)
    assert out.getvalue() == "\u00e4" * 300_000 + "\n"
    assert err.getvalue() == "error\n"


class Slow(io.StringIO):
    """A stream that is slower than who writes."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def write(self, text):
        time.sleep(self.seconds)
        return super().write(text)


def test_all_of_a_big_pipe_arrives_however_slow_the_stream_is(monkeypatch):
    def big_pipe(make=os.pipe):
        ours, theirs = make()
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 2**20)
        return ours, theirs

    monkeypatch.setattr(os, "pipe", big_pipe)
    monkeypatch.setattr(sys, "stdout", Slow(0.2))
    with passed_on() as (stdout, _):
        subprocess.run([sys.executable, "-c", "print('x' * 900_000)"], stdout=stdout, check=True)
    assert sys.stdout.getvalue() == "x" * 900_000 + "\n"


def test_somebody_who_goes_on_writing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Slow(0.01))
    with passed_on() as (stdout, _):
        stray = subprocess.Popen([sys.executable, "-c", TALKS], stdout=stdout, stderr=subprocess.DEVNULL)
        threading.Timer(8, stray.kill).start()
        time.sleep(0.5)
        left = time.monotonic()
    try:
        assert time.monotonic() - left < 5
        assert set(sys.stdout.getvalue()) == {"x"}
    finally:
        stray.kill()
        stray.wait()
