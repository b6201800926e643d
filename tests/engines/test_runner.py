"""The fixtures with real engines: what tests get, when engines are closed, and what counts as a leak."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from engine_lab import InnerRun, run_pytest

pytestmark = pytest.mark.engine

HEADER = """
import pytest

MODEL = {model!r}
ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)
COMPILED = dict(ENGINE, enforce_eager=False)
"""


def run(folder: Path, model: Path, source: str) -> InnerRun:
    """Run tests of one process; ``MODEL`` and ``ENGINE`` are defined for them."""
    return run_pytest(folder, HEADER.format(model=str(model)) + textwrap.dedent(source))


# --- what a test gets ---

SURFACE = """
import torch
import vllm
from vllm import SamplingParams

from pytest_vllm_cleanup import EngineClosedError, ModelDoesNotFitError, VllmRunner
from pytest_vllm_cleanup.engines.registry import registry

pytestmark = pytest.mark.gpu_released
PROMPT = "The captain walked slowly along the shore"
closed = []

class Recorder:
    def before_build(self, handle): pass
    def after_build(self, handle): pass
    def after_close(self, handle): closed.append(handle.number)

@pytest.fixture(autouse=True)
def record_order():
    recorder = Recorder()
    registry.listeners.append(recorder)
    yield
    registry.listeners.remove(recorder)

def test_call_and_generate(vllm_runner):
    runner = vllm_runner(MODEL, **ENGINE)
    assert isinstance(runner, VllmRunner)
    assert isinstance(runner.llm, vllm.LLM)
    ids = runner.llm.get_tokenizer().encode(PROMPT)
    [(greedy_ids, greedy_text)] = runner.generate_greedy([PROMPT], 6)
    assert greedy_ids[:len(ids)] == ids
    assert len(greedy_ids) == len(ids) + 6
    assert greedy_text.startswith(PROMPT)
    assert len(greedy_text) > len(PROMPT)
    by_ids, by_dictionary = (
        runner.generate_greedy([prompt], 6)[0] for prompt in (ids, {"prompt_token_ids": ids})
    )
    assert by_ids[0] == by_dictionary[0] == greedy_ids
    assert by_ids[1] == greedy_text[len(PROMPT):]
    both = runner.generate_greedy([PROMPT, "Hello"], 6)
    assert both[0] == (greedy_ids, greedy_text)
    assert both[1][1].startswith("Hello")
    [(sample_ids, texts)] = runner.generate([PROMPT], SamplingParams(n=2, seed=1, temperature=0.9, max_tokens=3))
    assert [len(sample) for sample in sample_ids] == [len(ids) + 3] * 2
    assert all(text.startswith(PROMPT) for text in texts)

def test_with_block_closes_at_its_end(vllm_runner):
    with vllm_runner(MODEL, **ENGINE) as runner:
        raw = runner.llm
        assert not runner.closed
    assert runner.closed
    assert runner.close() is runner.close()
    with pytest.raises(EngineClosedError, match="was used after it was closed"):
        runner.generate_greedy([PROMPT], 1)
    with pytest.raises(EngineClosedError):
        runner.llm
    with pytest.raises(EngineClosedError, match="was used after it was closed"):
        raw.generate(PROMPT)

def test_three_engines(vllm_runner):
    del closed[:]
    runners = [vllm_runner(MODEL, **ENGINE) for _ in range(3)]
    one, two, three = (runner.generate_greedy([PROMPT], 4) for runner in runners)
    assert one == two == three

def test_were_closed_in_reverse_order():
    assert len(closed) == 3
    assert closed == sorted(closed, reverse=True)

def test_fails(vllm_runner):
    llm = vllm_runner(MODEL, **ENGINE).llm
    assert llm is None, "on purpose"

def test_skips(vllm_runner):
    runner = vllm_runner(MODEL, **ENGINE)
    pytest.skip("on purpose")

@pytest.fixture
def broken(vllm_runner):
    runner = vllm_runner(MODEL, **ENGINE)
    raise LookupError("in the fixture")

def test_has_a_broken_fixture(broken):
    pass

def test_budget(vllm_runner):
    limits = dict(dtype="float32", enforce_eager=True, max_model_len=256)
    runner = vllm_runner(MODEL, max_memory="600 MiB", **limits)
    worker = runner.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    # The layers' tensors may share one piece of memory.
    storages = [tensor.untyped_storage() for tensor in worker.model_runner.kv_caches]
    cache = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert 500 << 20 < cache < 600 << 20
    assert runner.generate_greedy([PROMPT], 1)

def test_budget_is_checked(vllm_runner):
    with pytest.raises(ModelDoesNotFitError, match=r"the weights alone take .* MiB on each device, max_memory is 1"):
        vllm_runner(MODEL, max_memory="1 MiB")
    with pytest.raises(ModelDoesNotFitError, match=r"max_memory is 900 TiB, but host has only"):
        vllm_runner(MODEL, max_memory="900 TiB")
    for name in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
        with pytest.raises(ValueError, match=f"max_memory and {name} both limit the engine's memory"):
            vllm_runner(MODEL, max_memory="1 GiB", **{name: 0.5})

def test_nothing_is_left():
    assert list(registry.handles()) == []
"""


def test_vllm_runner_gives_engines_and_closes_them_whatever_happens(model: Path, tmp_path: Path) -> None:
    result = run(tmp_path, model, SURFACE)
    expected = {
        "test_call_and_generate": ["PASSED"],
        "test_with_block_closes_at_its_end": ["PASSED"],
        "test_three_engines": ["PASSED"],
        "test_were_closed_in_reverse_order": ["PASSED"],
        "test_fails": ["FAILED"],
        "test_skips": ["SKIPPED"],
        "test_has_a_broken_fixture": ["ERROR"],
        "test_budget": ["PASSED"],
        "test_budget_is_checked": ["PASSED"],
        "test_nothing_is_left": ["PASSED"],
    }
    assert result.outcomes == expected, result.output
    assert "AssertionError: on purpose" in result.section("test_fails")
    assert "LookupError: in the fixture" in result.section("test_has_a_broken_fixture")
    assert result.status == 1


# --- engines of wider scope ---

FACTORY = """
import torch
from pytest_vllm_cleanup.engines.registry import registry

kept = []

@pytest.fixture(scope="module")
def shared(vllm_runner_factory):
    return vllm_runner_factory(MODEL, **COMPILED)

def engines():
    return [str(handle.owner) for handle in registry.handles()]

class TestShared:
    @pytest.mark.gpu_released
    def test_one(self, shared):
        self.__class__.first = shared.generate_greedy(["Hello"], 8)
        assert len(engines()) == 1
        assert engines()[0].startswith("module-scoped fixture 'shared'")

    @pytest.mark.gpu_released
    def test_two_leaks(self, shared):
        kept.append(torch.ones(400 << 20, dtype=torch.uint8))
        assert shared.generate_greedy(["Hello"], 8) == self.first

    @pytest.mark.gpu_released
    def test_three(self, shared, vllm_runner):
        own = vllm_runner(MODEL, **ENGINE)
        assert own.generate_greedy(["Hello"], 8)
        assert len(engines()) == 2

    @pytest.mark.gpu_released
    def test_four(self, shared):
        assert shared.generate_greedy(["Hello"], 8) == self.first
        assert len(engines()) == 1
"""

FACTORY_LATER = """
import pytest
from pytest_vllm_cleanup.engines.registry import registry

@pytest.mark.gpu_released
def test_later_module_finds_no_engine():
    assert list(registry.handles()) == []
"""


def test_an_engine_of_module_scope_serves_its_tests_and_ends_with_the_module(model: Path, tmp_path: Path) -> None:
    (tmp_path / "test_later.py").write_text(FACTORY_LATER, encoding="utf-8")
    result = run(tmp_path, model, FACTORY)
    assert result.outcomes == {
        "test_one": ["PASSED"],
        "test_two_leaks": ["PASSED", "LEAKED"],
        "test_three": ["PASSED"],
        "test_four": ["PASSED"],
        "test_later_module_finds_no_engine": ["PASSED"],
    }, result.output
    # An engine that works may grow by 256 MiB on the host without being told from a leak; 400 MiB are more.
    assert 100 < result.leaked_mib("test_two_leaks") < 410


# --- engines without a fixture ---

PLAIN = """
import sys

from pytest_vllm_cleanup.engines.registry import registry

kept = []

def test_vllm_is_not_imported_yet():
    assert "vllm" not in sys.modules
    assert "torch" not in sys.modules

@pytest.mark.gpu_released
def test_first_engine_of_the_process(vllm_runner):
    assert vllm_runner(MODEL, **ENGINE).generate_greedy(["Hello"], 4)

@pytest.mark.gpu_released
def test_first_compiled_engine(vllm_runner):
    assert vllm_runner(MODEL, **COMPILED).generate_greedy(["Hello"], 4)

def build():
    from vllm import LLM
    return LLM(MODEL, disable_log_stats=True, **{**ENGINE, "kv_cache_memory_bytes": 256 << 20})

@pytest.mark.gpu_released
def test_drops_a_plain_engine():
    assert build().generate("Hello", use_tqdm=False)

@pytest.mark.gpu_released
def test_fails_with_a_plain_engine():
    llm = build()
    llm.owner = llm
    assert llm.generate("Hello", use_tqdm=False) == [], "on purpose"

@pytest.mark.gpu_released
def test_keeps_a_plain_engine():
    kept.append(build())
    assert kept[0].generate("Hello", use_tqdm=False)

@pytest.mark.gpu_released
def test_next_one(vllm_runner):
    assert list(registry.handles()) == []
    assert vllm_runner(MODEL, **ENGINE).generate_greedy(["Hello"], 4)
"""


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> InnerRun:
    return run(tmp_path_factory.mktemp("plain"), model, PLAIN)


def test_the_first_engine_of_a_process_is_not_charged_with_its_imports(plain: InnerRun) -> None:
    assert plain.outcomes["test_vllm_is_not_imported_yet"] == ["PASSED"], plain.output
    assert plain.outcomes["test_first_engine_of_the_process"] == ["PASSED"], plain.output
    assert plain.outcomes["test_first_compiled_engine"] == ["PASSED"], plain.output


def test_a_plain_engine_that_is_dropped_is_no_leak(plain: InnerRun) -> None:
    assert plain.outcomes["test_drops_a_plain_engine"] == ["PASSED"], plain.output


def test_a_failed_test_is_not_charged_with_the_engine_in_its_traceback(plain: InnerRun) -> None:
    assert plain.outcomes["test_fails_with_a_plain_engine"] == ["FAILED"], plain.output
    assert "AssertionError: on purpose" in plain.section("test_fails_with_a_plain_engine")


def test_a_plain_engine_that_is_kept_is_a_leak_and_is_closed_for_the_next_test(plain: InnerRun) -> None:
    assert plain.outcomes["test_keeps_a_plain_engine"] == ["PASSED", "LEAKED"], plain.output
    assert 256 < plain.leaked_mib("test_keeps_a_plain_engine") < 350
    section = plain.section("test_keeps_a_plain_engine")
    assert "It left an engine alive. Held by " in section
    assert "Make it with vllm_runner, or close it with close_engine()." in section
    assert "closed LLMEngine number" in section
    assert plain.outcomes["test_next_one"] == ["PASSED"], plain.output
