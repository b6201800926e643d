"""The fixtures and the marker with real engines on a real device."""

from __future__ import annotations

SUITE = """
    import pytest

    MODEL = {model!r}
    SMALL = dict(gpu_memory_utilization=0.05, max_model_len=256, max_num_seqs=2, enforce_eager=True)
    CACHE = {{}}

    pytestmark = pytest.mark.gpu_released

    def greedy(runner):
        return runner.generate_greedy(["The engine gives its memory back"], 8)

    def test_clean(vllm_runner):
        with vllm_runner(MODEL, **SMALL) as runner:
            CACHE["tokens"] = greedy(runner)

    def test_leaky():
        from vllm import LLM

        CACHE["llm"] = LLM(MODEL, **SMALL)

    def test_after(vllm_runner):
        assert greedy(vllm_runner(MODEL, **SMALL)) == CACHE["tokens"]

    def test_dropped():
        from vllm import LLM

        LLM(MODEL, **SMALL)

    def test_fails(vllm_runner):
        llm = vllm_runner(MODEL, **SMALL).llm
        assert not llm

    def test_last(vllm_runner):
        assert greedy(vllm_runner(MODEL, **SMALL)) == CACHE["tokens"]
"""

SHARED = """
    import pytest
    import torch

    MODEL = {model!r}
    KEPT = []

    pytestmark = pytest.mark.gpu_released

    @pytest.fixture(scope="module")
    def engine(vllm_runner_factory):
        return vllm_runner_factory(MODEL, max_memory="6 GiB", max_model_len=256, max_num_seqs=2)

    @pytest.mark.parametrize("number", range(3))
    def test_uses_it(engine, number):
        assert engine.generate_greedy(["one two three"], 4 + number)

    def test_keeps_a_tensor_meanwhile(engine):
        KEPT.append(torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda"))

    def test_needs_more_than_there_is(vllm_runner):
        from pytest_vllm_cleanup import ModelDoesNotFitError

        with pytest.raises(ModelDoesNotFitError, match=r"has only .* free"):
            vllm_runner(MODEL, max_memory="4096 GiB")
"""


def test_engines_in_process(run_suite, model):
    result = run_suite(SUITE.format(model=model), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_leaky LEAKED*",
            "*::test_after PASSED*",
            "*::test_dropped PASSED*",
            "*::test_fails FAILED*",
            "*::test_last PASSED*",
            "*::test_leaky left * GiB (* bytes) on cuda:0 by torch allocator*It left an engine alive*",
            "*1 failed, 5 passed*1 leaked*",
        ]
    )


def test_an_engine_of_wider_scope_is_not_charged_to_the_tests_that_use_it(run_suite, model):
    result = run_suite(SHARED.format(model=model), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["*::test_keeps_a_tensor_meanwhile LEAKED*", "*1 leaked*"])


def test_engines_in_child_processes(run_suite, model):
    selected = "test_clean or test_leaky or test_after"
    result = run_suite(SUITE.format(model=model), "-k", selected, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*::test_leaky LEAKED*", "*::test_leaky left * GiB (* bytes) on cuda:0 by processes on the device*"]
    )
