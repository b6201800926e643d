"""The folder in which the processes of one user find each other's locks."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path


class FolderError(OSError):
    """The folder belongs to somebody else, or others may write into it."""


def lock_folder() -> Path:
    """Return the folder, which is made if there is none.

    It is in the directory for temporary files, so processes with another ``TMPDIR`` have another one.

    Raises:
        FolderError: somebody else has put something in its place; the text names it.
        OSError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"pytest-vllm-cleanup-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise FolderError(f"{folder} is not a folder of this user alone; remove it, or set TMPDIR to another place")
    return folder


def file_name(kind: str, key: str) -> str:
    """Return the name of a lock's file: its kind, and what it is for, in characters that every file system takes."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9._-]', '_', key)}.lock"
