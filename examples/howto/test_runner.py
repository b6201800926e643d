"""vllm_runner: engines that are closed when the test is over."""

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.gpu_released


def test_call(vllm_runner, model, small):
    llm = vllm_runner(model, **small)
    [(_, text)] = llm.generate_greedy(["Hello"], max_tokens=4)
    assert text.startswith("Hello")


def test_with(vllm_runner, model, small):
    with vllm_runner(model, **small) as llm:
        expected = llm.generate_greedy(["Hello"], max_tokens=4)
    # The memory is back here, and the next engine has all of it.
    with vllm_runner(model, **small) as llm:
        assert llm.generate_greedy(["Hello"], max_tokens=4) == expected


def test_several(vllm_runner, model, small):
    first, second = vllm_runner(model, **small), vllm_runner(model, **small)
    first.close()  # the second one goes on
    assert second.generate_greedy(["Hello"], max_tokens=4)


def test_limited_start(vllm_runner, model, small):
    llm = vllm_runner(model, start_timeout="2 min", **small)
    assert not llm.closed


def test_budget(vllm_runner, model):
    llm = vllm_runner(model, max_memory="2 GiB", dtype="float32", enforce_eager=True)
    assert llm.generate_greedy(["Hello"], max_tokens=4)


def test_the_llm_itself(vllm_runner, model, small):
    llm = vllm_runner(model, **small).llm
    [result] = llm.generate(["Hello"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 4
