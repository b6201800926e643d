"""Tensors are logged in the test and in its teardown; pytest keeps the records for its report."""

from __future__ import annotations

import logging

import pytest
from zoo_expect import CLEAN
from zoo_tensors import logits

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
logger = logging.getLogger("watcher")


@pytest.fixture
def table():
    table = logits()
    yield table
    logger.warning("given back: %s", table)


def test_odd_logits_are_logged(caplog, table):
    logger.warning("odd logits: %s", table)
    assert "odd logits" in caplog.text
