"""Ten tests in one process, each with an engine of its own; the first fails with its engine in a local variable.

They know nothing of the plugin but a marker, so that they also run without it.
"""

from __future__ import annotations

import json
import os

import pytest

pytestmark = pytest.mark.gpu_released
PROMPT = "The captain walked slowly along the shore"
FIRST = {}


def build():
    from vllm import LLM

    return LLM(os.environ["BENCHMARK_MODEL"], disable_log_stats=True, **json.loads(os.environ["BENCHMARK_ENGINE"]))


def tokens(llm):
    from vllm import SamplingParams

    outputs = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


def compare(engine, expected):
    found = tokens(engine)
    FIRST["tokens"] = found
    assert found == expected, "fails with its engine in a local variable"


def test_fails():
    llm = build()
    compare(llm, expected=[])


@pytest.mark.parametrize("number", range(2, 11))
def test_passes(number):
    llm = build()
    assert tokens(llm) == FIRST["tokens"], f"test {number}"
