"""Where vLLM, Triton and Inductor keep compiled code, one place for each worker."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Mapping
from pathlib import Path


def caches_of(rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a worker caches of its own, which the next run finds again.

    They are below the caches that all workers would share: those of the environment, or each program's default.

    Args:
        rank: the worker's number among those of its machine.
        environ: its environment.
    """
    home = Path(environ.get("HOME") or Path.home())
    xdg = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    defaults = {
        "VLLM_CACHE_ROOT": xdg / "vllm",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{_user()}",
    }
    return {
        name: str(Path(environ.get(name) or default).expanduser() / f"worker-{rank}")
        for name, default in defaults.items()
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this number, as in many containers
        return "nobody"
