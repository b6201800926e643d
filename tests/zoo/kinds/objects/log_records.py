"""A handler that collects log records keeps their arguments."""

from __future__ import annotations

import logging

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/log_records.py: module global COLLECTOR -> Collector.records[0] -> "
    "LogRecord.args[1] -> Tensor"
)
pytestmark = pytest.mark.gpu_released


class Collector(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


COLLECTOR = Collector()
logger = logging.getLogger("sampler")
logger.addHandler(COLLECTOR)


def test_odd_logits_are_logged():
    logger.warning("odd logits in %s: %s", "captain", logits())
    assert COLLECTOR.records


def let_go():
    COLLECTOR.records.clear()
    logger.removeHandler(COLLECTOR)
