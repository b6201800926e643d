"""One tiny model for all engines, and the labs in which they are built."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterator
from pathlib import Path

import engine_lab
import pytest

from pytest_vllm_cleanup.testing import tiny_model


@pytest.fixture(scope="session")
def model() -> Path:
    # Always the same path: it is part of the key under which vLLM caches compiled code (6 s instead of 40 s).
    return tiny_model(Path(tempfile.gettempdir()) / f"pytest-vllm-cleanup-{getpass.getuser()}" / "llama")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine_lab.Lab]:
    """An interpreter that all scenarios share. Engines live in it, not in child processes."""
    with engine_lab.lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture
def fresh_lab(tmp_path: Path) -> Iterator[engine_lab.Lab]:
    """An interpreter for one test alone."""
    with engine_lab.lab(tmp_path) as made:
        yield made
