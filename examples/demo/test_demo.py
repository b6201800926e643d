import pytest
from vllm import LLM

CACHE = {}


@pytest.mark.gpu_released
def test_engine_of_the_fixture(vllm_runner, model, small):
    llm = vllm_runner(model, **small)
    [(_, text)] = llm.generate_greedy(["Hello, my name is"], max_tokens=8)
    assert text.startswith("Hello, my name is")


@pytest.mark.gpu_released
def test_engine_in_a_global(model, small):
    llm = LLM(str(model), **small)
    CACHE["llm"] = llm  # and nobody takes it out again
    assert llm.generate(["Hello"], use_tqdm=False)


@pytest.mark.gpu_released
def test_after_the_leak(vllm_runner, model, small):
    llm = vllm_runner(model, **small)
    assert len(llm.generate_greedy(["Hello", "Bye"], max_tokens=8)) == 2
