"""run_isolated: a function in a process of its own, of which nothing stays."""

import os
import time

import pytest

from pytest_vllm_cleanup import IsolatedProcessError, IsolatedTimeoutError, run_isolated


def test_its_own_environment():
    seen = run_isolated(os.getenv, "VLLM_ATTENTION_BACKEND", env={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, gpus=0)
    assert seen == "FLASHINFER"


def test_what_can_go_wrong():
    with pytest.raises(FileNotFoundError):  # what the function raises is raised here
        run_isolated(os.listdir, "/no/such/folder")
    with pytest.raises(IsolatedProcessError, match="exited with code 3"):
        run_isolated(os._exit, 3)
    with pytest.raises(IsolatedTimeoutError, match="had not returned after 2 s"):
        run_isolated(time.sleep, 600, timeout="2 s")
