"""An engine for tests, with the calls of vLLM's own test runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from packaging.version import Version

from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.close import close_engine
from pytest_vllm_cleanup.engines.deadline import DEFAULT_START_TIMEOUT, start_deadline
from pytest_vllm_cleanup.engines.drain import release_unreleased
from pytest_vllm_cleanup.engines.errors import EngineClosedError, UnsupportedVllmError
from pytest_vllm_cleanup.engines.measure import current_gauge
from pytest_vllm_cleanup.engines.registry import CloseReport
from pytest_vllm_cleanup.engines.release import installed_release, require_vllm
from pytest_vllm_cleanup.memory import HOST, Reading
from pytest_vllm_cleanup.memory.units import parse_duration, parse_size
from pytest_vllm_cleanup.runners.budget import device_count, engine_arguments

# The first release whose CPU worker takes kv_cache_memory_bytes.
_CPU_BUDGETS = Version("0.20")

Prompt: TypeAlias = str | Sequence[int] | dict[str, Any]
Texts: TypeAlias = tuple[list[list[int]], list[str]]


class VllmRunner:
    """One ``LLM``, closed by ``close()``, by leaving a ``with`` block, or by the fixture that made it.

    Args:
        model_name: name or path of the model.
        max_memory: an absolute budget for weights and KV cache on each device, in bytes or as text ("4 GiB").
            Checked against what is free before the engine starts. None: vLLM decides.
        start_timeout: how long the engine may take to start, in seconds or as text ("2 min"); 0: any time.
        seed: vLLM's seed, fixed by default so that tests repeat.
        **arguments: any further keyword of ``LLM``, passed through unchanged.

    Raises:
        UnsupportedVllmError: vLLM is absent or older than 0.11.
        ModelDoesNotFitError: the budget cannot hold the model, or a device has less than the budget free.
        EngineStartTimeoutError: the engine had not started in time, and was stopped; the text has its stacks.
        ValueError: ``max_memory`` is not a size, or contradicts another argument; ``start_timeout`` is not a time.
    """

    def __init__(
        self,
        model_name: str | Path,
        *,
        max_memory: int | str | None = None,
        start_timeout: float | str = DEFAULT_START_TIMEOUT,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        self._llm: Any = None
        self._report: CloseReport | None = None
        self._name = str(model_name)
        require_vllm()
        instrument.install()
        if max_memory is not None:
            budget = parse_size(max_memory)
            release_unreleased()
            arguments.update(engine_arguments(budget, model_name, arguments, _devices_of(arguments)))
        arguments.setdefault("disable_log_stats", True)
        limit = parse_duration(start_timeout)
        from vllm import LLM

        with start_deadline(limit, f"the engine of {self._name}"):
            self._llm = LLM(model=self._name, seed=seed, **arguments)

    @property
    def llm(self) -> Any:
        """The ``LLM``. Raises ``EngineClosedError`` after ``close()``."""
        if self._llm is None:
            raise EngineClosedError(
                f"the runner of {self._name} was used after it was closed. Its memory has been given back; "
                "build a new one, or use vllm_runner_factory in a fixture of wider scope."
            )
        return self._llm

    @property
    def closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._llm is None

    def get_inputs(self, prompts: Iterable[Prompt]) -> list[Any]:
        """Turn prompts (text, token ids, or vLLM's own dictionaries) into what ``LLM.generate`` takes."""
        return [
            prompt if isinstance(prompt, (str, dict)) else {"prompt_token_ids": [int(token) for token in prompt]}
            for prompt in prompts
        ]

    def generate(self, prompts: Iterable[Prompt], sampling_params: Any, **arguments: Any) -> list[Texts]:
        """Return for each prompt (ids of each sample, texts of each sample), the prompt in front of both."""
        arguments.setdefault("use_tqdm", False)
        results = self.llm.generate(self.get_inputs(prompts), sampling_params=sampling_params, **arguments)
        return [
            (
                [[*(result.prompt_token_ids or ()), *sample.token_ids] for sample in result.outputs],
                [(result.prompt or "") + sample.text for sample in result.outputs],
            )
            for result in results
        ]

    def generate_greedy(
        self, prompts: Iterable[Prompt], max_tokens: int, **arguments: Any
    ) -> list[tuple[list[int], str]]:
        """Generate at temperature 0; return for each prompt (ids, text), the prompt in front of both."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=self._detokenizes())
        return [(ids[0], texts[0]) for ids, texts in self.generate(prompts, greedy, **arguments)]

    def close(self) -> CloseReport | None:
        """Close the engine and give back all its memory. Closing it again does nothing.

        Returns:
            what was done, with times in seconds and the errors of steps that failed.
        """
        if self._llm is not None:
            llm, self._llm = self._llm, None
            self._report = close_engine(llm)
        return self._report

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _detokenizes(self) -> bool:
        return not self.llm.llm_engine.model_config.skip_tokenizer_init


def _devices_of(arguments: dict[str, Any]) -> list[Reading]:
    snapshot = current_gauge().read()
    if HOST in snapshot:
        release = installed_release()
        if release is not None and release < _CPU_BUDGETS:
            raise UnsupportedVllmError(
                f"max_memory on the CPU needs vLLM {_CPU_BUDGETS} or later, {release} is installed: older ones size "
                "the KV cache by the environment variable VLLM_CPU_KVCACHE_SPACE alone."
            )
        return [snapshot[HOST]]
    by_number = sorted(snapshot.items(), key=lambda pair: int(pair[0].rpartition(":")[2]))
    return [reading for _, reading in by_number][: device_count(arguments)]
