"""Processes whose launcher has ended: those of a test are measured as ours, and nobody ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

CONFTEST = """
import os
from pytest_vllm_cleanup.engines import measure
from pytest_vllm_cleanup.memory import Gauge
from pytest_vllm_cleanup.memory.meters.host import HostMeter
def pytest_configure():
    measure._gauges[os.getpid()] = Gauge([HostMeter()], measure.our_processes)
"""
HOLDS = "import os, time; held = bytearray(b'x' * (200 << 20)); open('up', 'w').write(str(os.getpid())); time.sleep(60)"
LAUNCH = f"""
import os, subprocess, sys, time
def launch():
    subprocess.run(["sh", "-c", '"$@" &', "sh", sys.executable, "-c", {HOLDS!r}], stdout=subprocess.DEVNULL, check=True)
def wait():
    while not os.path.exists("up") or not open("up").read():
        time.sleep(0.01)
"""
HEADER = f"import pytest\n{LAUNCH}"


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a test module on a machine without accelerators; what it left running is ended afterwards."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)

    def run(source, *arguments):
        pytester.makepyfile(test_inner=HEADER + source)
        return pytester.runpytest_subprocess("-p", "vllm_cleanup", "--vllm-cleanup-timeout=0", *arguments)

    yield run
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int((pytester.path / "up").read_text()), signal.SIGKILL)


def test_the_orphan_of_a_test_counts_as_its_own_is_named_and_lives_on(run, pytester):
    result = run("""
@pytest.mark.gpu_released
def test_it():
    launch()
    wait()
""")
    assert result.parseoutcomes() == {"passed": 1, "leaked": 1}
    pid = int((pytester.path / "up").read_text())
    assert f"Held by process {pid} (" in result.stdout.str()
    assert ", whose parent has ended: " in result.stdout.str()
    os.kill(pid, 0)  # it is there


def test_what_starts_outside_the_run_meanwhile_does_not_count(run):
    neighbour = f"{LAUNCH}\nwhile not os.path.exists('go'): time.sleep(0.01)\nlaunch()"
    with subprocess.Popen([sys.executable, "-c", neighbour]):
        result = run("""
@pytest.mark.gpu_released
def test_it():
    open("go", "w").close()
    wait()
""")
    assert result.parseoutcomes() == {"passed": 1}


TELLS = """
import os
{marker}
def test_it():
    print("MARK", os.environ.get("PYTEST_VLLM_CLEANUP_RUN"))
"""
UNCONFIGURED = """
import os, pytest
@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    print("LEFT", os.environ.get("PYTEST_VLLM_CLEANUP_RUN"))
"""


@pytest.mark.parametrize(("marker", "is_marked"), [("", False), ("@pytest.mark.gpu_released", True)])
def test_the_environment_is_marked_only_while_tests_are_watched(run, pytester, monkeypatch, marker, is_marked):
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_RUN", "17.4711")
    pytester.makeconftest(CONFTEST + UNCONFIGURED)
    result = run(TELLS.format(marker=marker), "-s")
    (mark,) = (line.split("MARK ")[1].rstrip(".") for line in result.outlines if "MARK " in line)
    assert mark.startswith("17.4711:") == is_marked
    assert "LEFT 17.4711" in result.outlines
