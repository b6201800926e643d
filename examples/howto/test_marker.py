"""gpu_released: which tests are checked, and how strictly."""

import pytest
from vllm import LLM

from pytest_vllm_cleanup import close_engine

pytestmark = pytest.mark.gpu_released  # every test of this module


@pytest.mark.gpu_released(tolerance="96 MiB", timeout="2 min", reason="builds a table that stays")
def test_with_its_own_limits(vllm_runner, model, small):
    assert vllm_runner(model, **small).generate_greedy(["Hello"], max_tokens=4)


KEPT = []


@pytest.mark.gpu_released(check=False, reason="the next test takes over its engine")
def test_not_checked(model, small):
    KEPT.append(LLM(str(model), **small))


def test_takes_over():
    close_engine(KEPT.pop())
