"""Inner test runs, each in a process of its own, on a machine with fake GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_gpu.py")
HEADER = "import pytest\nfrom fake_gpu import MIB, Tensor, gpu, second_gpu\n"


@pytest.fixture
def fake_gpu(pytester):
    """Puts the fake GPUs into the folder of the inner run; returns what its conftest needs to use them."""
    shutil.copy(FAKE, pytester.path / FAKE.name)
    return 'pytest_plugins = ["fake_gpu"]\n'


@pytest.fixture
def hasty(monkeypatch):
    """Memory that stays is not waited for."""
    monkeypatch.setenv("PYTEST_VLLM_CLEANUP_TIMEOUT", "0")


@pytest.fixture
def run(pytester, monkeypatch, fake_gpu):
    """Runs a test module, given as text, or several by name, with this plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source, *arguments, conftest="", bug=""):
        pytester.makeconftest(fake_gpu + conftest)
        pytester.makepyfile(bug=bug)
        modules = {"test_inner": source} if isinstance(source, str) else source
        pytester.makepyfile(**{name: HEADER + text for name, text in modules.items()})
        return pytester.runpytest_subprocess("-p", "vllm_cleanup", "-p", "no:cacheprovider", *arguments)

    return run
