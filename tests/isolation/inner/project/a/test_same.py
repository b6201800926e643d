"""Has the same name as the module in the other folder."""

from __future__ import annotations

import warnings

import pytest


@pytest.mark.vllm_isolated(reason="shows its surroundings")
def test_facts(show):
    warnings.warn("from a", stacklevel=1)
