"""A fresh process is measured by coverage if its parent is, however that was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OPTIONS = (
    "run:branch",
    "run:concurrency",
    "run:core",
    "run:cover_pylib",
    "run:data_file",
    "run:include",
    "run:omit",
    "run:plugins",
    "run:relative_files",
    "run:source",
    "run:source_dirs",
    "run:source_pkgs",
)


def settings() -> dict[str, Any] | None:
    """Return how this process is measured, None if it is not."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module is not None else None
    if current is None:
        return None
    options = {}
    for name in _OPTIONS:
        try:
            options[name] = current.get_option(name)
        except Exception:  # of a later or earlier release
            continue
    if data_file := options.get("run:data_file"):
        options["run:data_file"] = os.path.abspath(data_file)  # noqa: PTH100  # as coverage does
    return {"config_file": getattr(current.config, "config_file", None) or False, "options": options}


@contextmanager
def measured(how: dict[str, Any] | None) -> Iterator[None]:
    """Measure what runs inside, into a data file of its own beside the parent's, which coverage combines."""
    if how is None or _is_measured():
        yield
        return
    import coverage

    measuring = coverage.Coverage(config_file=how["config_file"], data_suffix=True)
    for name, value in how["options"].items():
        measuring.set_option(name, value)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


def _is_measured() -> bool:
    """Whether coverage measures already: where it is told to follow child processes, it does so by itself."""
    module = sys.modules.get("coverage")
    return module is not None and module.Coverage.current() is not None
