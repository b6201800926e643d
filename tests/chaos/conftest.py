"""All tests of this folder share one campaign: inner runs of pytest, each brought down in its own way."""

from __future__ import annotations

import getpass
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_vllm_cleanup.testing import tiny_model

from .arena import Arena
from .campaign import Campaign
from .device import Device
from .records import Records
from .runs import Fate, Run

_NEEDED = ("vllm", "psutil", "setproctitle", "pytest_timeout", "xdist")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-results", type=Path, metavar="FILE", help="write what became of each death, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [module for module in _NEEDED if find_spec(module) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


@pytest.fixture(scope="session")
def device() -> Device:
    return Device()


@pytest.fixture(scope="session")
def records(request: pytest.FixtureRequest, device: Device) -> Records:
    # Not an option where this folder is only one of several that are collected.
    return Records(request.config.getoption("--chaos-results", None), device)


@pytest.fixture(scope="session")
def campaign(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: Device, records: Records
) -> Iterator[Campaign]:
    # Always the same path: it is part of the key under which vLLM caches compiled code.
    model = tiny_model(Path(tempfile.gettempdir()) / f"pytest-vllm-cleanup-{getpass.getuser()}" / "llama")
    folder = tmp_path_factory.mktemp("chaos")
    corrupt = folder / "corrupt_model"
    shutil.copytree(model, corrupt)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    runs = [value["run"] for value in parameters if isinstance(value.get("run"), Run)]
    made = Campaign(Arena(folder, model, corrupt, device), records, runs, at_once=4 if device.is_gpu else 2)
    yield made
    made.stop()


@pytest.fixture
def fate(run: Run, campaign: Campaign) -> Fate:
    """What became of the run that a test is parametrized with."""
    return campaign.fate(run)
