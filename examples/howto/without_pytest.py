"""Engines that are freed for sure, in a program that has nothing to do with tests. Takes the path of a model."""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM

from pytest_vllm_cleanup import assert_gpu_released, close_engine, run_isolated, vllm_engine

model = sys.argv[1]
small = {"max_model_len": 256, "kv_cache_memory_bytes": 64 * 2**20, "enforce_eager": True, "dtype": "float32"}


def complete(prompts):
    llm = LLM(model, **small)
    return [output.outputs[0].text for output in llm.generate(prompts)]


print(run_isolated(complete, ["Hello", "Bye"], timeout="10 min"))

with assert_gpu_released(), vllm_engine(model, **small) as llm:
    print(llm.generate(["Hello"])[0].outputs[0].text)

llm = LLM(model, **small)
report = close_engine(llm)
print(f"closed in {report.seconds:.1f} s, {len(report.errors)} errors")
