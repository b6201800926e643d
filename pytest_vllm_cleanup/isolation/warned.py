"""Warnings as plain data, and back."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from pytest_vllm_cleanup.isolation.wire import plain


def as_data(
    warning_message: warnings.WarningMessage, nodeid: str, location: tuple[str, int, str] | None
) -> dict[str, Any]:
    """Return what pytest noted of a warning."""
    category = warning_message.category
    message = warning_message.message
    return {
        "category": (category.__module__, category.__qualname__),
        "arguments": plain(message.args) if isinstance(message, Warning) else (str(message),),
        "text": str(message),
        "filename": warning_message.filename,
        "lineno": warning_message.lineno,
        "line": warning_message.line,
        "nodeid": nodeid,
        "location": plain(location),
    }


def from_data(data: dict[str, Any]) -> warnings.WarningMessage:
    """Return a warning as it was, with a category of this process: its own, if it has it, or one of the same name."""
    category = _category(*data["category"])
    message: Warning
    try:
        message = category(*data["arguments"])
        if str(message) != data["text"]:
            raise ValueError
    except Exception:  # its constructor takes something else
        message = type(category.__name__, (UserWarning,), {"__module__": category.__module__})(data["text"])
        category = type(message)
    return warnings.WarningMessage(message, category, data["filename"], data["lineno"], line=data["line"])


def _category(module: str, name: str) -> type[Warning]:
    found: Any = sys.modules.get(module)  # what only the test needs, such as torch, is not imported here
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # without a module's __getattr__, which may import as well
    if isinstance(found, type) and issubclass(found, Warning):
        return found
    return type(name.rpartition(".")[2], (UserWarning,), {"__module__": module})
