"""The architectures of the tiny models: what their config.json says and which tensors they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_vllm_cleanup.tiny.tokenizer import FEWEST_TOKENS, SPECIAL_IDS, UNCHOSEN_TOKENS

_HEAD_SIZE = 64  # supported by FlashAttention and by vLLM's CPU attention


class Tensor(NamedTuple):
    """A tensor to write: uniform noise of the given standard deviation around a mean."""

    name: str
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0
    zero_rows: int = 0  # so many leading rows are zero


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    fixed: Mapping[str, Any]  # what config.json says in any case
    sizes: Mapping[str, Any]  # what a caller may override, with the defaults
    tensors: Callable[[Mapping[str, Any]], Iterator[Tensor]]

    def configure(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json.

        Raises:
            ValueError: An override has an unknown key or a wrong type, or the sizes do not fit.
        """
        config = {**self.fixed, **self.sizes}
        for key, value in overrides.items():
            if key not in self.sizes:
                kind = self.fixed["model_type"]
                raise ValueError(f"{kind} has no config key {key!r} to override: {', '.join(self.sizes)}")
            config[key] = _checked(key, value, type(self.sizes[key]))
        hidden = config["hidden_size"]
        if "num_attention_heads" not in overrides:
            config["num_attention_heads"] = max(1, hidden // config.get("head_dim", _HEAD_SIZE))
        heads = config["num_attention_heads"]
        if hidden % heads:
            raise ValueError(f"hidden_size={hidden} is not divisible by num_attention_heads={heads}")
        if "num_key_value_heads" in config:
            if "num_key_value_heads" not in overrides:
                config["num_key_value_heads"] = 2 if heads % 2 == 0 else 1
            groups = config["num_key_value_heads"]
            if heads % groups:
                raise ValueError(f"num_attention_heads={heads} is not divisible by num_key_value_heads={groups}")
        if "word_embed_proj_dim" in config:
            config["word_embed_proj_dim"] = hidden
        if config["vocab_size"] < FEWEST_TOKENS:
            raise ValueError(f"vocab_size={config['vocab_size']}: must be at least {FEWEST_TOKENS}")
        return config


def _checked(key: str, value: Any, wanted: type) -> Any:
    if wanted is bool and isinstance(value, bool):
        return value
    # A bool is an int to Python, and an int is a good float.
    if wanted is not bool and type(value) in (wanted, int) and value > 0:
        return wanted(value)
    raise ValueError(f"{key}={value!r}: must be a {'bool' if wanted is bool else f'positive {wanted.__name__}'}")


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), columns**-0.5)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), 0.1)


def _norm(name: str, size: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (size,), 0.0, mean=1.0)
    if bias:
        yield Tensor(f"{name}.bias", (size,), 0.0)


def _embedding_deviation(config: Mapping[str, Any]) -> float:
    """Large enough for varied text, but a tied embedding must not make a token predict itself."""
    return float(config["hidden_size"]) ** -0.5 if config["tie_word_embeddings"] else 0.5


def _embedding(config: Mapping[str, Any], name: str) -> Iterator[Tensor]:
    """Give the token embedding and, unless it is tied to it, the output matrix."""
    shape, tied = (config["vocab_size"], config["hidden_size"]), config["tie_word_embeddings"]
    # A logit of 0 is never the largest: greedy decoding gives no special token and no broken character.
    unchosen = UNCHOSEN_TOKENS
    yield Tensor(name, shape, _embedding_deviation(config), zero_rows=unchosen if tied else 0)
    if not tied:
        yield Tensor("lm_head.weight", shape, shape[1] ** -0.5, zero_rows=unchosen)


def _decoder_tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Llama, Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k)."""
    hidden, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    yield from _embedding(config, "model.embed_tokens.weight")
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield from _norm(f"{layer}.input_layernorm", hidden)
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            yield from _linear(f"{layer}.self_attn.{part}_proj", count * head, hidden, bias=kind == "qwen2")
        if kind == "qwen3":
            yield from _norm(f"{layer}.self_attn.q_norm", head)
            yield from _norm(f"{layer}.self_attn.k_norm", head)
        yield from _linear(f"{layer}.self_attn.o_proj", hidden, heads * head)
        yield from _norm(f"{layer}.post_attention_layernorm", hidden)
        yield from _linear(f"{layer}.mlp.gate_proj", inner, hidden)
        yield from _linear(f"{layer}.mlp.up_proj", inner, hidden)
        yield from _linear(f"{layer}.mlp.down_proj", hidden, inner)
    yield from _norm("model.norm", hidden)


def _opt_tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    yield from _embedding(config, "model.decoder.embed_tokens.weight")
    # OPT's positions start at 2.
    positions = (config["max_position_embeddings"] + 2, hidden)
    yield Tensor("model.decoder.embed_positions.weight", positions, _embedding_deviation(config))
    for index in range(config["num_hidden_layers"]):
        layer = f"model.decoder.layers.{index}"
        yield from _norm(f"{layer}.self_attn_layer_norm", hidden, bias=True)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{part}", hidden, hidden, bias=True)
        yield from _norm(f"{layer}.final_layer_norm", hidden, bias=True)
        yield from _linear(f"{layer}.fc1", inner, hidden, bias=True)
        yield from _linear(f"{layer}.fc2", hidden, inner, bias=True)
    yield from _norm("model.decoder.final_layer_norm", hidden, bias=True)


def _bert_tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for part, rows in (
        ("word", config["vocab_size"]),
        ("position", config["max_position_embeddings"]),
        ("token_type", config["type_vocab_size"]),
    ):
        yield Tensor(f"embeddings.{part}_embeddings.weight", (rows, hidden), 1.0)
    yield from _norm("embeddings.LayerNorm", hidden, bias=True)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _linear(f"{layer}.attention.{part}", hidden, hidden, bias=True)
        yield from _norm(f"{layer}.attention.output.LayerNorm", hidden, bias=True)
        yield from _linear(f"{layer}.intermediate.dense", inner, hidden, bias=True)
        yield from _linear(f"{layer}.output.dense", hidden, inner, bias=True)
        yield from _norm(f"{layer}.output.LayerNorm", hidden, bias=True)
    yield from _linear("pooler.dense", hidden, hidden, bias=True)


def lora_tensors(base: Mapping[str, Any], rank: int) -> Iterator[Tensor]:
    """Yield the tensors of a LoRA adapter in PEFT's naming, for a Llama, Qwen2 or Qwen3 config."""
    hidden, heads = base["hidden_size"], base["num_attention_heads"]
    head = base.get("head_dim", hidden // heads)
    for index in range(base["num_hidden_layers"]):
        for part, count in (("q_proj", heads), ("v_proj", base["num_key_value_heads"])):
            name = f"base_model.model.model.layers.{index}.self_attn.{part}"
            yield Tensor(f"{name}.lora_A.weight", (rank, hidden), hidden**-0.5)
            yield Tensor(f"{name}.lora_B.weight", (count * head, rank), rank**-0.5)


# Classic keys (torch_dtype, rope_theta): transformers 4 and 5 both read them, without a warning.
_COMMON = {**SPECIAL_IDS, "torch_dtype": "bfloat16", "use_cache": True}
_SIZES = {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER_FIXED = {**_COMMON, "hidden_act": "silu", "initializer_range": 0.02}
_DECODER_SIZES = {
    **_SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        {**_DECODER_FIXED, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {**_DECODER_SIZES, "head_dim": _HEAD_SIZE},
        _decoder_tensors,
    ),
    "qwen2": Architecture(
        {**_DECODER_FIXED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        _DECODER_SIZES,
        _decoder_tensors,
    ),
    "qwen3": Architecture(
        {**_DECODER_FIXED, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {**_DECODER_SIZES, "head_dim": _HEAD_SIZE},
        _decoder_tensors,
    ),
    "opt": Architecture(
        {
            **_COMMON,
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "word_embed_proj_dim": 256,
        },
        {**_SIZES, "ffn_dim": 512, "max_position_embeddings": 2048, "tie_word_embeddings": False},
        _opt_tensors,
    ),
    "bert": Architecture(
        {
            **_COMMON,
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
        },
        {**_SIZES, "intermediate_size": 512, "max_position_embeddings": 512},
        _bert_tensors,
    ),
}
