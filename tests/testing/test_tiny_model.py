"""Tiny models: what is in the folders, and that real engines start on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pytest_vllm_cleanup import testing
from pytest_vllm_cleanup.testing import tiny_lora, tiny_model

safetensors = pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

ARCHITECTURES = ("llama", "qwen2", "qwen3", "opt", "bert")
PROMPTS = ("The captain walked slowly along the shore", "A computer program is")


def run_python(script: str, *arguments: object, **environment: str) -> Any:
    """Run the script in a fresh interpreter and return the JSON of its last line."""
    root = str(Path(testing.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def shapes(file: Path) -> dict[str, list[int]]:
    with safetensors.safe_open(file, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
        return {name: part.get_shape() for name, part in slices.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        tiny_model(folder / architecture, architecture)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder_is_complete(models: Path, architecture: str) -> None:
    assert sorted(contents(models / architecture)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tiny_manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_model_is_written_in_seconds_and_is_small(tmp_path: Path) -> None:
    started = time.perf_counter()
    folder = tiny_model(tmp_path / "deep" / "below" / "model")
    assert time.perf_counter() - started < 2
    assert sum(map(len, contents(folder).values())) < 5_000_000


def test_another_process_writes_the_same_bytes_without_heavy_imports(models: Path, tmp_path: Path) -> None:
    script = """
import json, sys
from pathlib import Path
from pytest_vllm_cleanup.testing import tiny_model
for architecture in sys.argv[2:]:
    tiny_model(Path(sys.argv[1], architecture), architecture)
print(json.dumps([name for name in ("torch", "transformers", "vllm") if name in sys.modules]))
"""
    assert run_python(script, tmp_path, *ARCHITECTURES, PYTHONHASHSEED="7") == []
    for architecture in ARCHITECTURES:
        assert contents(tmp_path / architecture) == contents(models / architecture)


def test_same_call_reuses_the_folder(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "model", num_hidden_layers=1)
    written = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    assert tiny_model(str(tmp_path / "model"), num_hidden_layers=1) == first
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == written


def test_simultaneous_calls_share_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: tiny_model(tmp_path / "model"), range(4)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    with pytest.raises(FileExistsError, match=r"other arguments .*llama.* asked for now .*qwen3"):
        tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(FileExistsError, match="num_hidden_layers"):
        tiny_model(tmp_path / "model", num_hidden_layers=1)


def test_folder_of_another_format_version_is_refused(tmp_path: Path) -> None:
    manifest = tiny_model(tmp_path / "model") / "tiny_manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    with pytest.raises(FileExistsError, match="'format': 0"):
        tiny_model(tmp_path / "model")


def test_folder_with_other_content_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        tiny_model(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    assert tiny_model(tmp_path) == tmp_path
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("library", ["numpy", "tokenizers"])
def test_missing_library_names_the_extra_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*pytest-vllm-cleanup\[testing\]"):
        tiny_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_unknown_architecture_names_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt5'.*llama, qwen2, qwen3, opt, bert"):
        tiny_model(tmp_path / "model", "gpt5")


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("llama", {"layers": 4}, "llama has no config key 'layers'.*num_hidden_layers"),
        ("llama", {"model_type": "qwen2"}, "no config key 'model_type'"),
        ("bert", {"num_key_value_heads": 1}, "bert has no config key 'num_key_value_heads'"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: must be a positive int"),
        ("llama", {"num_hidden_layers": 2.5}, r"num_hidden_layers=2\.5"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("llama", {"hidden_size": "256"}, "hidden_size='256'"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be a bool"),
        ("llama", {"hidden_size": 250, "num_attention_heads": 4}, "250 is not divisible by .*=4"),
        ("llama", {"num_key_value_heads": 3}, "4 is not divisible by num_key_value_heads=3"),
        ("llama", {"vocab_size": 300}, "vocab_size=300: must be at least 320"),
    ],
)
def test_wrong_overrides_are_refused(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(tmp_path / "model", architecture, **overrides)
    assert list(tmp_path.iterdir()) == []


def test_overrides_shape_config_and_weights(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", num_hidden_layers=4, hidden_size=512, rope_theta=500000)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (4, 8)
    assert config["rope_theta"] == 500000.0
    found = shapes(folder / "model.safetensors")
    assert found["model.layers.3.self_attn.q_proj.weight"] == [512, 512]
    assert found["model.layers.3.self_attn.k_proj.weight"] == [128, 512]


def test_tied_embeddings_leave_out_the_output_matrix(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", tie_word_embeddings=True)
    assert "lm_head.weight" not in shapes(folder / "model.safetensors")


@pytest.mark.parametrize("vocab_size", [320, 1024, 3000])
def test_every_id_of_the_vocabulary_is_text(tmp_path: Path, vocab_size: int) -> None:
    folder = tiny_model(tmp_path / "model", vocab_size=vocab_size)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(vocab_size))


@pytest.fixture(scope="module")
def loaded(models: Path) -> dict[str, Any]:
    """What transformers makes of the folders; in a process of its own, because it imports torch."""
    pytest.importorskip("transformers")
    script = r"""
import json, sys
from pathlib import Path
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
TEXTS = [
    "", "The captain walked.", "  two  spaces\t\n", "don't <|pad|> .",
    "h\u00e9llo \u4f60\u597d \U0001f389 \x00",
]
results = {}
for architecture in sys.argv[2:]:
    path = Path(sys.argv[1], architecture)
    tokenizer = AutoTokenizer.from_pretrained(path)
    kind = AutoModel if architecture == "bert" else AutoModelForCausalLM
    model, info = kind.from_pretrained(path, output_loading_info=True)
    results[architecture] = {
        "round_trips": all(tokenizer.decode(tokenizer(text).input_ids) == text for text in TEXTS),
        "vocabulary": len(tokenizer),
        "chat": tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        ),
        "specials": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "misfits": sorted(str(entry) for entries in info.values() if entries for entry in entries),
        "dtype": str(model.dtype),
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values()),
    }
print(json.dumps(results))
"""
    result: dict[str, Any] = run_python(script, models, *ARCHITECTURES)
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_every_weight_and_the_tokenizer(loaded: dict[str, Any], architecture: str) -> None:
    assert loaded[architecture] == {
        "round_trips": True,
        "vocabulary": 1024,
        "chat": "<|bos|>user: Hi\nassistant: ",
        "specials": [0, 1, 2],
        "misfits": [],
        "dtype": "torch.bfloat16",
        "finite": True,
    }


def test_adapter_fits_its_base(models: Path, tmp_path: Path) -> None:
    folder = tiny_lora(tmp_path / "adapter", models / "llama", rank=4)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 4, ["q_proj", "v_proj"])
    found = shapes(folder / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.1.self_attn"
    assert len(found) == 8
    assert found[f"{layer}.q_proj.lora_A.weight"] == [4, 256]
    assert found[f"{layer}.q_proj.lora_B.weight"] == [256, 4]
    assert found[f"{layer}.v_proj.lora_B.weight"] == [128, 4]


def test_adapters_differ_by_seed_alone(models: Path, tmp_path: Path) -> None:
    weights = [
        contents(tiny_lora(tmp_path / name, models / "llama", seed=seed))["adapter_model.safetensors"]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]
    with pytest.raises(FileExistsError, match="other arguments"):
        tiny_lora(tmp_path / "a", models / "llama", seed=1)


def test_adapter_refuses_what_it_cannot_serve(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'opt'.*llama, qwen2, qwen3"):
        tiny_lora(tmp_path / "adapter", models / "opt")
    with pytest.raises(ValueError, match="rank=0"):
        tiny_lora(tmp_path / "adapter", models / "llama", rank=0)
    with pytest.raises(ValueError, match="seed=-1"):
        tiny_lora(tmp_path / "adapter", models / "llama", seed=-1)
    assert list(tmp_path.iterdir()) == []


ENGINE = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams
def engine(path, **options):
    return LLM(
        model=path, max_model_len=256, max_num_seqs=8, enforce_eager=True,
        kv_cache_memory_bytes=64 << 20, **options
    )
"""


@pytest.mark.engine
def test_engine_generates_text_that_depends_on_the_prompt(models: Path) -> None:
    pytest.importorskip("vllm")
    script = """
llm = engine(sys.argv[1])
greedy = SamplingParams(temperature=0, max_tokens=16)
first, second = (llm.generate(sys.argv[2:], greedy, use_tqdm=False) for _ in range(2))
print(json.dumps({
    "texts": [output.outputs[0].text for output in first],
    "again": [output.outputs[0].text for output in second],
    "lengths": [len(output.outputs[0].token_ids) for output in first],
    "distinct": [len(set(output.outputs[0].token_ids)) for output in first],
    "prompts": [output.prompt_token_ids for output in first],
    "chat": llm.chat([{"role": "user", "content": "Hi"}], greedy, use_tqdm=False)[0].outputs[0].text,
}))
"""
    # The third prompt ends like the first one: only what was said before tells them apart.
    prompts = (*PROMPTS, "A whale came to the shore")
    found = run_python(ENGINE + script, models / "llama", *prompts)
    tokenizer = tokenizers.Tokenizer.from_file(str(models / "llama" / "tokenizer.json"))
    assert found["prompts"] == [tokenizer.encode(prompt).ids for prompt in prompts]
    assert found["texts"] == found["again"]
    assert len(set(found["texts"])) == len(prompts)
    assert found["lengths"] == [16, 16, 16]
    assert min(found["distinct"]) >= 6, found["texts"]
    assert all(text.isascii() and text.strip() for text in [*found["texts"], found["chat"]])


@pytest.mark.engine
def test_engine_embeds_with_the_pooling_model(models: Path) -> None:
    pytest.importorskip("vllm")
    script = """
llm = engine(sys.argv[1], runner="pooling")
outputs = llm.embed(sys.argv[2:], use_tqdm=False)
print(json.dumps([output.outputs.embedding for output in outputs]))
"""
    first, second = run_python(ENGINE + script, models / "bert", *PROMPTS)
    assert (len(first), len(second)) == (256, 256)
    assert sum(x * x for x in first) == pytest.approx(1, abs=0.02)
    assert sum(x * y for x, y in zip(first, second, strict=True)) < 0.95


@pytest.mark.engine
def test_engine_follows_the_adapter(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    # float32: vLLM 0.32's CPU build dies by SIGILL in bfloat16 attention (AMX) when LoRA is on.
    script = """
from vllm.lora.request import LoRARequest
llm = engine(sys.argv[1], enable_lora=True, max_loras=2, max_lora_rank=8, dtype="float32")
greedy = SamplingParams(temperature=0, max_tokens=16)
requests = [None, *(LoRARequest(path, i, path) for i, path in enumerate(sys.argv[3:], 1))]
print(json.dumps([
    llm.generate(sys.argv[2], greedy, lora_request=request, use_tqdm=False)[0].outputs[0].text
    for request in requests
]))
"""
    adapters = [tiny_lora(tmp_path / str(seed), models / "llama", seed=seed) for seed in (0, 1)]
    texts = run_python(ENGINE + script, models / "llama", PROMPTS[0], *adapters)
    assert len(set(texts)) == 3, texts
