"""CUDA's driver library as this process has it; nobody loads or starts it here."""

from __future__ import annotations

import ctypes
import os
from typing import Any

NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED


def loaded() -> Any | None:
    """Return the library, None if nobody has loaded it in this process."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
