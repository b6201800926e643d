"""Plugins that repeat tests, as pytest calls them."""

from __future__ import annotations

REPEATERS = ("rerunfailures", "pytest_rerunfailures")  # where it is installed, and where it was named with -p
