from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from pytest_vllm_cleanup.testing import tiny_model


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not _gpu():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _gpu() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except Exception:
        return False


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def run_suite(pytester, monkeypatch):
    """Run an inner test module in a process of its own."""

    def run(source, *arguments, **environ):
        for name, value in {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **environ}.items():
            monkeypatch.setenv(name, value)
        installed = any(point.name == "vllm_cleanup" for point in metadata.entry_points(group="pytest11"))
        plugin = "vllm_cleanup" if installed else "pytest_vllm_cleanup.plugin"
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", plugin, "-p", "no:cacheprovider", "-v", *arguments)

    return run
