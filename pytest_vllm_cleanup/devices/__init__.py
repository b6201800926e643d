"""Which devices a process sees, and which physical device each of them is."""

from __future__ import annotations

from .visible import NvmlDevice, VisibleDevice, from_cuda, from_environment, parse_visible

__all__ = ["NvmlDevice", "VisibleDevice", "from_cuda", "from_environment", "parse_visible"]
