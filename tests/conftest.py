"""For all tests of this project."""

from __future__ import annotations

pytest_plugins = ["pytester"]
