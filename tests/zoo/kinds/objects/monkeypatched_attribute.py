"""A function of another module is patched and never restored; the patch closes over the tensor."""

from __future__ import annotations

import webbrowser

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="webbrowser: module global open -> "
    "closure variable 'page' of test_pages_are_opened.<locals>.<lambda> -> Tensor"
)
pytestmark = pytest.mark.gpu_released
PATCHES = pytest.MonkeyPatch()


def test_pages_are_opened():
    page = logits()
    PATCHES.setattr(webbrowser, "open", lambda url: page.all())
    assert webbrowser.open("https://localhost")


def let_go():
    PATCHES.undo()
