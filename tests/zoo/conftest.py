"""All tests of this folder share inner runs of pytest, each with many kinds in one process."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from .inner import Run
from .keeper import Keeper
from .results import Results

collect_ignore = ["kinds"]
try:
    import pynvml

    pynvml.nvmlInit()
    HAS_GPU = pynvml.nvmlDeviceGetCount() > 0
except Exception:  # no driver here
    HAS_GPU = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-results", type=Path, metavar="FILE", help="write what was said of each kind, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [module for module in ("torch", "vllm") if find_spec(module) is None]
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
        if not HAS_GPU and item.path == Path(__file__).with_name("test_gpu.py"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    # Not an option where this folder is only one of several that are collected.
    return Results(request.config.getoption("--zoo-results", None))


@pytest.fixture(scope="session")
def keeper(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, results: Results
) -> Iterator[Keeper]:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    runs = [run for value in parameters if isinstance(run := value.get("run"), Run) and _can_run(run)]
    made = Keeper(tmp_path_factory.mktemp("zoo"), results, runs)
    yield made
    made.close()


def _can_run(run: Run) -> bool:
    return run.device == "cpu" or HAS_GPU
