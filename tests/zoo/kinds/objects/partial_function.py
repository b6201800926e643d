"""Jobs are collected with their arguments bound."""

from __future__ import annotations

from functools import partial

import pytest
from zoo_expect import Expect
from zoo_tensors import logits

EXPECT = Expect(
    holder="tests/zoo/kinds/objects/partial_function.py: module global JOBS[0] -> "
    "argument 'tensor' of functools.partial of score -> Tensor"
)
pytestmark = pytest.mark.gpu_released
JOBS = []


def score(tensor, row):
    return tensor[row].sum()


def test_jobs_are_run():
    JOBS.append(partial(score, logits()))
    assert all(job(0) for job in JOBS)


def let_go():
    JOBS.clear()
