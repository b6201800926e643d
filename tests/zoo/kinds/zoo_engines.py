"""The engines that the kinds build."""

from __future__ import annotations

import os

from vllm import SamplingParams
from zoo_expect import DEVICE, MIB

MODEL = os.environ["ZOO_MODEL"]
ENGINE = {"max_model_len": 256, "max_num_seqs": 2, "enforce_eager": True, "disable_log_stats": True}
if DEVICE == "cuda":
    # With a fixed cache, vLLM does not mind that others take and give memory while it starts.
    ENGINE |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1024 * MIB}
else:
    # Some processors say that they have the instructions of vLLM's bfloat16 attention, and have not.
    ENGINE |= {"dtype": "float32", "kv_cache_memory_bytes": 128 * MIB}
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
        # On processors vLLM puts a worker below the core, which takes as long to start again.
        ENGINE["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def generate(llm):
    """Return the text that follows a prompt."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    return llm.generate(["The captain walked"], greedy, use_tqdm=False)[0].outputs[0].text
