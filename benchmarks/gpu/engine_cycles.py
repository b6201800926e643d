"""Build and close engines of every kind in one process, again and again, and record what memory is left.

    python benchmarks/gpu/engine_cycles.py --out benchmarks/results/engine_cycles.json

Figures are in bytes: allocated and reserved by torch's allocator, and in use on the device by the driver.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common import Device, Results

from pytest_vllm_cleanup import close_engine, vllm_engine
from pytest_vllm_cleanup.checks.peak import GpuMemory
from pytest_vllm_cleanup.engines import instrument
from pytest_vllm_cleanup.engines.drain import release_unreleased
from pytest_vllm_cleanup.testing import tiny_lora, tiny_model

PROMPTS = ["The engine gives its memory back", "One two three four one two three four one two"]
COMMON: dict[str, Any] = {"gpu_memory_utilization": 0.05, "max_model_len": 512, "max_num_seqs": 4, "seed": 0}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}


def generate(llm: Any, **arguments: Any) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, greedy, use_tqdm=False, **arguments)]


def sampled(llm: Any) -> list[list[int]]:
    """Also sample with top-k and top-p, whose kernels keep buffers of their own."""
    from vllm import SamplingParams

    llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=8), use_tqdm=False)
    return generate(llm)


def slept(llm: Any) -> list[list[int]]:
    tokens = generate(llm)
    llm.sleep(level=1)
    llm.wake_up()
    return generate(llm) if generate(llm) == tokens else [[-1]]


def asleep(llm: Any) -> list[list[int]]:
    tokens = generate(llm)
    llm.sleep(level=1)
    return tokens


def embedded(llm: Any) -> list[list[int]]:
    return [[round(value * 1000) for value in out.outputs.embedding[:8]] for out in llm.embed(PROMPTS, use_tqdm=False)]


class Bench:
    def __init__(self, cycles: int, folder: Path, out: Path) -> None:
        self.cycles = cycles
        self.memory = GpuMemory()
        self.llama = str(tiny_model(folder / "llama"))
        self.bert = str(tiny_model(folder / "bert", "bert"))
        self.lora = str(tiny_lora(folder / "lora", folder / "llama"))
        self.results: dict[str, Any] = {}
        self.record = Results(out, Device(), baseline=self.figures(), results=self.results)

    def figures(self) -> dict[str, int | None]:
        reading = self.memory.device()
        return {"allocated": reading.allocated, "reserved": reading.reserved, "used": reading.used, "own": reading.own}

    def kind(self, name: str, work: Callable[[Any], list[list[int]]], **arguments: Any) -> None:
        rows, tokens, error = [], [], None
        model = arguments.pop("model", self.llama)
        for _ in range(self.cycles):
            try:
                started = time.monotonic()
                with vllm_engine(model, **COMMON, **arguments) as llm:
                    built = time.monotonic() - started
                    idle = self.figures()
                    tokens.append(work(llm))
                    full = self.figures()
                    report = close_engine(llm)
                rows.append(
                    {
                        "build_s": round(built, 2),
                        "close_s": round(report.seconds, 2),
                        "collections": report.collections,
                        "errors": report.errors,
                        "alive": report.alive,
                        "built": idle,
                        "worked": full,
                        "left": self.figures(),
                    }
                )
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"[:600]
                traceback.print_exc()
                break
        release_unreleased()
        self.results[name] = {
            "cycles": rows,
            "error": error,
            "same_tokens": bool(tokens) and all(one == tokens[0] for one in tokens),
            "distinct_tokens": len({token for row in tokens[:1] for one in row for token in one}),
            "steps": [[step, round(seconds, 3)] for step, seconds, _ in report.steps] if rows else [],
        }
        left = [row["left"] for row in rows]
        print(
            f"{name:<12} {error or ''} left allocated {[row['allocated'] for row in left]} reserved "
            f"{[row['reserved'] for row in left]} used MiB {[row['used'] >> 20 for row in left]} "
            f"close {[row['close_s'] for row in rows]} same tokens {self.results[name]['same_tokens']} "
            f"errors {[row['errors'] for row in rows if row['errors']][:1]} "
            f"alive {[row['alive'] for row in rows if row['alive']][:1]}",
            flush=True,
        )

    def failure(self) -> None:
        """Start-ups that fail in KV-cache sizing, each between two good engines."""
        rows = []
        tokens = [self._good()]
        for _ in range(self.cycles):
            message = "no failure"
            try:
                with vllm_engine(self.llama, **{**COMMON, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 16}):
                    pass
            except Exception as problem:
                message = f"{type(problem).__name__}: {problem}"[:200]
            failed = self.figures()
            tokens.append(self._good())
            rows.append({"failure": message, "after_failure": failed, "left": self.figures()})
        same = all(one == tokens[0] for one in tokens)
        self.results["failure"] = {"cycles": rows, "same_tokens": same}
        print("failure     ", rows, "same tokens", same, flush=True)

    def _good(self) -> list[list[int]]:
        with vllm_engine(self.llama, **COMMON, **GRAPHS) as llm:
            return generate(llm)

    def siblings(self) -> None:
        """Two live engines: closing either leaves the other generating the same tokens."""
        from vllm import LLM

        rows = []
        for order, eager in ((0, False), (1, False), (0, True)):
            options = {**COMMON, **({"enforce_eager": True} if eager else GRAPHS)}
            engines = [LLM(self.llama, **options), LLM(self.llama, **options)]
            before = [generate(engine) for engine in engines]
            first, second = (engines[0], engines[1]) if order == 0 else (engines[1], engines[0])
            one = close_engine(first)
            after = [generate(second), sampled(second)]
            two = close_engine(second)
            same = before[0] == before[1] and all(tokens == before[0] for tokens in after)
            rows.append(
                {
                    "closed_first": order,
                    "eager": eager,
                    "same_tokens": same,
                    "errors": one.errors + two.errors,
                    "left": self.figures(),
                }
            )
            del first, second, engines
        self.results["siblings"] = {"cycles": rows, "same_tokens": all(row["same_tokens"] for row in rows)}
        print("siblings    ", rows, flush=True)

    def run(self, only: list[str]) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("tiny", 1, self.lora)
        ngram = {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        }
        kinds: dict[str, Callable[[], None]] = {
            "failure": self.failure,
            "siblings": self.siblings,
            "compiled": lambda: self.kind("compiled", sampled, **GRAPHS),
            "eager": lambda: self.kind("eager", sampled, enforce_eager=True),
            "sleep": lambda: self.kind("sleep", slept, enable_sleep_mode=True, **GRAPHS),
            "asleep": lambda: self.kind("asleep", asleep, enable_sleep_mode=True, **GRAPHS),
            "lora": lambda: self.kind(
                "lora",
                lambda llm: generate(llm, lora_request=request),
                enable_lora=True,
                max_loras=2,
                max_lora_rank=8,
                **GRAPHS,
            ),
            "ngram": lambda: self.kind("ngram", generate, **ngram, **GRAPHS),
            "pooling": lambda: self.kind("pooling", embedded, model=self.bert, runner="pooling", enforce_eager=True),
        }
        for name, kind in kinds.items():
            if only and name not in only:
                continue
            try:
                kind()
            except Exception as problem:
                traceback.print_exc()
                self.results.setdefault(name, {})["error"] = f"{type(problem).__name__}: {problem}"[:600]
                with suppress(Exception):
                    release_unreleased()
            self.record.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    instrument.install()
    with tempfile.TemporaryDirectory() as folder:
        Bench(options.cycles, Path(folder), options.out).run(options.only)


if __name__ == "__main__":
    main()
