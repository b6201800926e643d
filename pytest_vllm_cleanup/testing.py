"""Tiny models for tests: real architectures with random weights, written in a fraction of a second.

Nothing is downloaded, and neither torch nor transformers is imported. What is written depends on
the arguments alone, so the same call gives the same weights and tokens on every machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.tiny.architectures import ARCHITECTURES, lora_tensors
from pytest_vllm_cleanup.tiny.folder import write_json, write_once
from pytest_vllm_cleanup.tiny.tokenizer import SPECIAL_IDS, write_tokenizer
from pytest_vllm_cleanup.tiny.weights import write_weights

__all__ = ["tiny_lora", "tiny_model"]

_LORA_BASES = ("llama", "qwen2", "qwen3")


def tiny_model(path: str | os.PathLike[str], architecture: str = "llama", **config_overrides: Any) -> Path:
    """Write a complete Hugging Face model folder with random weights and return its path.

    The model takes text and gives text, and loads with and without ``load_format="dummy"``. Its
    weights are bfloat16, 3 to 4 MB by default. A greedy continuation depends on the whole prompt,
    never stops before ``max_tokens``, and is made of ASCII words. Two implementations may round
    near ties differently; compare them with ``dtype="float32"``.

    Args:
        path: The folder. It is created if absent; a folder that the same call wrote before is reused.
        architecture: ``llama``, ``qwen2``, ``qwen3`` or ``opt`` (text generation), or ``bert``
            (embeddings; start it with ``runner="pooling"``). Every string survives the tokenizer,
            but transformers 5 brings text for ``qwen2`` into Unicode's NFC form.
        **config_overrides: Entries of config.json, such as ``num_hidden_layers=4``. The numbers of
            heads follow from the other sizes where they are not given.

    Returns:
        ``path`` as a ``Path``.

    Raises:
        ValueError: Unknown architecture, a key that its config does not have, or sizes that do not fit.
        FileExistsError: The folder holds something else.
        ImportError: ``numpy`` or ``tokenizers`` is missing (both come with vLLM).
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}: choose from {', '.join(ARCHITECTURES)}")
    known = ARCHITECTURES[architecture]
    config = known.configure(config_overrides)

    def write(folder: Path) -> None:
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", SPECIAL_IDS)
        write_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])
        write_weights(folder / "model.safetensors", known.tensors(config), seed=0)

    return write_once(Path(path), {"architecture": architecture, "overrides": config_overrides}, write)


def tiny_lora(path: str | os.PathLike[str], base: str | os.PathLike[str], rank: int = 8, seed: int = 0) -> Path:
    """Write a LoRA adapter in PEFT's format for a model of ``tiny_model`` and return its path.

    The adapter changes ``q_proj`` and ``v_proj`` of every layer, enough to change what greedy
    decoding gives. Adapters with different seeds differ.

    Args:
        path: The folder. It is created if absent; a folder that the same call wrote before is reused.
        base: The folder of a ``llama``, ``qwen2`` or ``qwen3`` model.
        rank: The adapter's rank. The engine's ``max_lora_rank`` must be at least as large.
        seed: Seed of the random weights, at least 0.

    Returns:
        ``path`` as a ``Path``.

    Raises:
        ValueError: The base is of another architecture, or the rank or seed is too small.
        FileNotFoundError: ``base`` has no config.json.
        FileExistsError: The folder holds something else.
        ImportError: ``numpy`` is missing (it comes with vLLM).
    """
    config = json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in _LORA_BASES:
        raise ValueError(
            f"{base} is of type {config['model_type']!r}: an adapter needs one of {', '.join(_LORA_BASES)}"
        )
    if rank < 1 or seed < 0:
        raise ValueError(f"rank={rank}, seed={seed}: the rank must be at least 1, the seed at least 0")
    adapter = {
        "base_model_name_or_path": os.fspath(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }

    def write(folder: Path) -> None:
        write_json(folder / "adapter_config.json", adapter)
        write_weights(folder / "adapter_model.safetensors", lora_tensors(config, rank), seed)

    return write_once(Path(path), {"adapter": adapter, "seed": seed, "base": config}, write)
