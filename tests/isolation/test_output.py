"""What a fresh process writes reaches streams that are no files, and nobody is waited for who goes on writing."""

from __future__ import annotations

import io
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

    def write(self, text):
        time.sleep(0.01)
        return super().write(text)


def test_somebody_who_goes_on_writing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Slow())
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
