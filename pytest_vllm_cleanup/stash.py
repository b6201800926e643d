"""Keys under which this plugin keeps its things with pytest."""

from __future__ import annotations

import pytest

from pytest_vllm_cleanup.config import Settings

SETTINGS = pytest.StashKey[Settings]()
