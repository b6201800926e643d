"""One engine for several tests."""

import pytest
from vllm import LLM

from pytest_vllm_cleanup import close_engine


@pytest.fixture(scope="module")
def llm(vllm_runner_factory, model, small):
    return vllm_runner_factory(model, **small)


@pytest.mark.gpu_released
def test_one(llm):
    assert llm.generate_greedy(["Hello"], max_tokens=4)


@pytest.mark.gpu_released
def test_another(llm):
    assert llm.generate_greedy(["Bye"], max_tokens=4)


@pytest.fixture(scope="class")
def plain_llm(model, small):
    llm = LLM(str(model), **small)
    yield llm
    close_engine(llm)


@pytest.mark.gpu_released
class TestWithoutTheFactory:
    def test_one(self, plain_llm):
        assert plain_llm.generate(["Hello"], use_tqdm=False)

    def test_another(self, plain_llm):
        assert plain_llm.generate(["Bye"], use_tqdm=False)
