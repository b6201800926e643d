"""Folders for inner runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from .runs import Folder


@pytest.fixture(scope="session")
def folder_factory(tmp_path_factory) -> Callable[..., Folder]:
    """Makes a folder with files, for as many runs as tests like."""

    def make(files: Mapping[str, str] | None = None, copies: Iterable[str] = ()) -> Folder:
        return Folder(tmp_path_factory.mktemp("inner"), files, copies)

    return make


@pytest.fixture
def folder(folder_factory) -> Callable[..., Folder]:
    """Makes a folder with files, for the runs of one test."""
    return folder_factory
