"""Engines that hang while they start: stopped in time, with their stacks."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_lab import IN_CHILD_PROCESSES, run_pytest

from pytest_vllm_cleanup.engines import drain, instrument
from pytest_vllm_cleanup.engines.deadline import start_deadline
from pytest_vllm_cleanup.engines.errors import EngineStartTimeoutError
from pytest_vllm_cleanup.engines.registry import State, registry
from pytest_vllm_cleanup.workers import starting


def test_what_hangs_in_this_process_is_interrupted_and_says_where() -> None:
    begun = time.monotonic()
    with pytest.raises(EngineStartTimeoutError) as caught, start_deadline(0.2, "the engine of llama"):
        _hang()
    assert time.monotonic() - begun < 8
    text = str(caught.value)
    assert text.startswith("the engine of llama did not start within 0.2 s (start_timeout).")
    assert "in _hang" in text
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def _hang() -> None:
    time.sleep(60)


def test_what_is_quick_enough_is_left_alone() -> None:
    with start_deadline(0.3, "the engine"):
        pass
    time.sleep(0.5)


def test_zero_means_no_limit() -> None:
    with start_deadline(0, "the engine"):
        time.sleep(0.05)


def test_an_error_of_the_constructor_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="no such model"), start_deadline(30, "the engine"):
        raise ValueError("no such model")


def test_a_constructor_that_swallows_the_interrupt_has_failed_all_the_same() -> None:
    with pytest.raises(EngineStartTimeoutError), start_deadline(0.2, "e"), contextlib.suppress(KeyboardInterrupt):
        _hang()


def test_ctrl_c_is_not_mistaken_for_the_limit() -> None:
    with pytest.raises(KeyboardInterrupt), start_deadline(30, "the engine"):
        raise KeyboardInterrupt


class Locks:
    """Those for starts, as if another engine was starting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, error: BaseException | None = None) -> None:
        self._seconds, self._error = seconds, error
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
        monkeypatch.setattr(registry, "turns", None)
        monkeypatch.setattr(starting, "_locks", lambda: self)
        starting.install()

    @contextlib.contextmanager
    def starting(self) -> Iterator[str]:
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        yield "3 s for process 7 (gw1)"


class Engine:
    pass


def test_waiting_for_the_start_of_another_engine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    Locks(monkeypatch, 0.6)
    with start_deadline(0.4, "the engine"):
        instrument._construct(lambda: None, Engine(), (), {})
    told = r"not counted, it had waited 3 s for process 7 \(gw1\)"
    with pytest.raises(EngineStartTimeoutError, match=told), start_deadline(0.4, "the engine"):
        instrument._construct(_hang, Engine(), (), {})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("a time limit of the test")])
def test_an_engine_that_was_given_up_while_it_waited_is_not_being_built_for_ever(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    Locks(monkeypatch, 0, error)
    before = {handle.number for handle in registry.handles()}
    with pytest.raises(type(error)):
        instrument._construct(lambda: None, Engine(), (), {})
    left = [handle for handle in registry.handles() if handle.number not in before]
    assert not [handle for handle in left if handle.state is State.BUILDING]
    drain.release_unreleased()


INNER = """
import os
import pytest

ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)

@pytest.mark.gpu_released
def test_hangs(vllm_runner):
    # A weight loader that waits for ever: for a lock that nobody gives back, or a file system that does not answer.
    vllm_runner({model!r}, start_timeout="{limit} s", load_format="hangs", **ENGINE)

@pytest.mark.gpu_released
def test_next(vllm_runner):
    assert vllm_runner({model!r}, **ENGINE).generate_greedy(["Hello"], 4)
"""

LOADER = """
import time
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

@register_model_loader("hangs")
class HangingLoader(DummyModelLoader):
    def load_model(self, *args, **kwargs):
        wait_for_ever()

def wait_for_ever():
    time.sleep(600)

def register():
    pass
"""

DISTRIBUTION = """[vllm.general_plugins]
hangs = hanging_loader:register
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("environ", "limit"),
    [({}, 10), (IN_CHILD_PROCESSES, 75)],
    ids=["in process", "in child processes"],
)
def test_an_engine_that_hangs_is_stopped_with_its_stacks(
    model: Path, tmp_path: Path, environ: dict[str, str], limit: int
) -> None:
    # vLLM's processes load plugins by entry point, and so learn of the loader.
    plugins = tmp_path / "plugins"
    metadata = plugins / "hanging_loader-1.0.dist-info"
    metadata.mkdir(parents=True)
    (plugins / "hanging_loader.py").write_text(LOADER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging-loader\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(DISTRIBUTION)
    folder = tmp_path / "run"
    folder.mkdir()
    source = textwrap.dedent(INNER).format(model=str(model), limit=limit)
    run = run_pytest(folder, source, {**environ, "PYTHONPATH": str(plugins)})
    assert run.outcomes == {"test_hangs": ["FAILED"], "test_next": ["PASSED"]}, run.output
    assert f"did not start within {limit} s (start_timeout)" in run.section("test_hangs")
    assert "in wait_for_ever" in run.section("test_hangs")
