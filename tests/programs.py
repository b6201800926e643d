"""Programs that stand for the processes of an engine. Each prints a line when it is up."""

from __future__ import annotations

PATIENT = "import sys; print('up', flush=True); sys.stdin.read()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {PATIENT}"

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""
"""Starts a child, prints its number, and waits."""

GROWING = """
import subprocess, sys
print("up", flush=True)
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""
"""Starts its child when it is told to."""
