"""Keys and names under which this plugin keeps its things with pytest."""

from __future__ import annotations

import pytest

from pytest_vllm_cleanup.config import Settings

SETTINGS = pytest.StashKey[Settings]()

# Plugins that others look for without loading them.
MONITOR = "vllm_cleanup_monitor"
ISOLATED_CHILD = "vllm_cleanup_isolated_child"
