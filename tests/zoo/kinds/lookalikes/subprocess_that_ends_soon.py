"""A job ends by itself, soon after the test."""

from __future__ import annotations

import subprocess

import pytest
from zoo_expect import CLEAN
from zoo_processes import JOB

EXPECT = CLEAN
pytestmark = pytest.mark.gpu_released
JOBS = []


def test_the_job_starts():
    job = subprocess.Popen([*JOB, "1.5"], stdout=subprocess.PIPE)
    JOBS.append(job)
    assert job.stdout.readline()


def let_go():
    for job in JOBS:
        job.communicate()
