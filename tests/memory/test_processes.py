from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from pytest_vllm_cleanup.memory.meters import processes
from pytest_vllm_cleanup.memory.meters.processes import holds_context, is_helper, users_of_driver, uses_driver
from pytest_vllm_cleanup.processes import watchdog


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A file that stands for the driver's device."""
    file = tmp_path / "nvidia-uvm"
    file.touch()
    monkeypatch.setattr(processes, "_OPEN_WITH_CUDA", (str(file),))
    return file


def test_a_process_uses_the_driver_while_it_has_its_device_open(driver):
    assert not uses_driver(os.getpid())
    with driver.open():
        assert uses_driver(os.getpid())
    assert not uses_driver(os.getpid())


def test_another_process_that_lives_is_found_and_one_that_ended_or_is_a_zombie_is_not(driver):
    code = "import sys; held = open(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(driver)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        (use,) = users_of_driver({process.pid, os.getpid()})
        assert (use.pid, use.bytes, use.ours) == (process.pid, None, True)
        assert use.name.startswith("python")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert users_of_driver({process.pid}) == ()
    assert users_of_driver({process.pid}) == ()


def test_a_process_that_may_not_be_looked_into_may_use_the_driver(monkeypatch):
    def refuse(_path):
        raise PermissionError

    monkeypatch.setattr(processes.Path, "iterdir", refuse)
    assert uses_driver(os.getpid())


@pytest.mark.parametrize(
    ("command", "helper"),
    [
        ([sys.executable, "-c", "from multiprocessing.resource_tracker import main;main(7)"], True),
        ([sys.executable, "-I", "-S", "-c", watchdog._CODE, "1", "2", "/somewhere"], True),
        ([sys.executable, "-c", "from multiprocessing.spawn import spawn_main"], False),
        (["VLLM::EngineCore"], False),
        ([sys.executable, "-m", "pytest", "-p", "pytest_vllm_cleanup.plugin"], False),
    ],
)
def test_helpers_of_the_session_are_told_from_engines(command, helper):
    assert is_helper(command) is helper


class TestContext:
    class Driver:
        """CUDA's library with two devices."""

        def __init__(self, active=(), error=0):
            self.active = active
            self.error = error

        def cuDeviceGetCount(self, count):
            count._obj.value = 2
            return self.error

        def cuDevicePrimaryCtxGetState(self, number, flags, active):
            active._obj.value = number in self.active
            return 0

    @pytest.mark.parametrize(
        ("driver", "may"),
        [
            (Driver(), False),  # it was only asked for its devices, as torch.cuda.is_available() does
            (Driver(active=[1]), True),
            (Driver(error=3), False),  # loaded, as Triton does, and not started
            (Driver(error=999), True),  # broken
        ],
    )
    def test_the_driver_tells_contexts_of_this_process(self, monkeypatch, driver, may):
        asked = []
        monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append((name, mode)) or driver)
        assert holds_context() is may
        assert asked == [("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)]

    def test_a_driver_that_nobody_has_loaded_is_not_loaded(self):
        code = (
            "from pytest_vllm_cleanup.memory.meters.processes import holds_context; print(holds_context());"
            "print('libcuda' in open('/proc/self/maps').read())"
        )
        command = [sys.executable, "-c", code]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
