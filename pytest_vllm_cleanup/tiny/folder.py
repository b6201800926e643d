"""Folders that are written once: complete or absent, and reused by the same call."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Raise it with every change to what is written: an older folder is then refused, not reused.
_FORMAT = 1
_MANIFEST = "tiny_manifest.json"


def write_once(path: Path, arguments: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a folder that becomes ``path``, unless the same arguments did before.

    Returns:
        ``path``.

    Raises:
        FileExistsError: The folder holds something else.
    """
    manifest = json.loads(json.dumps({"format": _FORMAT, **arguments}))
    if _is_complete(path, manifest):
        return path
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        write(draft)
        write_json(draft / _MANIFEST, manifest)
        try:
            # In one step: another process (an xdist worker) never sees half a folder.
            draft.rename(target)
        except OSError:
            if not _is_complete(path, manifest):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that depends on the content alone."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def explained_import() -> Iterator[None]:
    """Say which extra to install where a library is missing."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"tiny models need {error.name}, which comes with vLLM or with: pip install 'pytest-vllm-cleanup[testing]'",
            name=error.name,
        ) from error


def _is_complete(path: Path, manifest: Mapping[str, Any]) -> bool:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    try:
        found = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileExistsError(f"{path} holds something else than a tiny model or adapter: use another folder") from None
    if found != manifest:
        raise FileExistsError(
            f"{path} was written with other arguments ({found}) than asked for now ({manifest}): "
            "use another folder, or delete this one"
        )
    return True
