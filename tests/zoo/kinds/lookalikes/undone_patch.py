"""A patch with pytest's own fixture is undone by it."""

from __future__ import annotations

import webbrowser

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released


def test_pages_are_opened(monkeypatch):
    page = logits()
    monkeypatch.setattr(webbrowser, "open", lambda url: page.all())
    assert webbrowser.open("https://localhost")
