"""The tokenizer of the tiny models: byte-level BPE, trained on the spot on the text below."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_vllm_cleanup.tiny.folder import explained_import, write_json

# transformers 5 gives every Qwen2 tokenizer an <|endoftext|>, as an id of its own where it is absent.
_BOS, _EOS, _PAD = _SPECIALS = ("<|bos|>", "<|endoftext|>", "<|pad|>")
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

# The first ids are the special tokens and the 256 bytes (so that every string has tokens). Greedy
# decoding picks none of them.
UNCHOSEN_TOKENS = len(_SPECIALS) + 256
FEWEST_TOKENS = 320

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# Long enough for the 765 merges of the default vocabulary.
_TEXT = """
The harbour was quiet in the early morning. Fishing boats rested against the wooden pier while gulls
circled above the water, looking for breakfast. An old captain walked slowly along the shore and
greeted everyone he met, because he knew all the families of the village and their stories. Behind
the church a narrow street climbed towards the mountain, where farmers kept sheep, goats and a few
horses. In spring the meadows turned yellow and purple; in winter deep snow covered every roof.

Children learned arithmetic, geography and music at the small school. Their teacher believed that
curiosity matters more than memory, so she asked questions: Why does the moon change its shape? How
many stones would fill this bucket? What happens when warm air rises? Sometimes nobody could answer,
and then they built an experiment together with paper, string, candles and glass bottles.

A computer program is a list of instructions. The processor reads one instruction after another,
moves numbers between registers and memory, and writes results back. When a program has finished, it
should return everything that it borrowed: open files, network connections, locks and large buffers.
Otherwise the machine becomes slower with each run until somebody has to restart it. Good engineers
measure before they guess, keep careful notes, and test one change at a time.

On Saturday evening people gathered around the market square. Bakers sold fresh bread, honey cakes
and apple pies; musicians played violins, drums and an accordion. Travellers from distant countries
described deserts, jungles, volcanoes and frozen oceans. "Have you really seen a whale?" whispered
the youngest girl. "Yes," laughed the sailor, "twice, near the northern islands, about 1984." Before
midnight the lanterns were put out, the visitors said goodbye, and the river could be heard again.

Long ago another traveller described a wonderful library beneath the palace gardens. Philosophers and
gardeners discussed justice, friendship, electricity and vegetables there, until a thunderstorm
destroyed its magnificent entrance. Workers replaced the marble columns with simple oak beams.
"""


def write_tokenizer(folder: Path, vocab_size: int, longest: int) -> None:
    """Train a byte-level BPE tokenizer and write its files into the folder.

    Args:
        folder: An existing folder.
        vocab_size: How many tokens the tokenizer has, at least ``FEWEST_TOKENS``.
        longest: The longest sequence that the model takes, in tokens.

    Raises:
        ImportError: ``tokenizers`` is missing.
    """
    with explained_import():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    content = json.loads(tokenizer.to_str())
    # Whatever id a random model picks must be text, so ids above the merges are words that only decode.
    words: dict[str, int] = content["model"]["vocab"]
    words.update({f"\u0120word{i}": i for i in range(len(words), vocab_size)})
    write_json(folder / "tokenizer.json", content)
    specials = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}
    write_json(folder / "special_tokens_map.json", specials)
    write_json(
        folder / "tokenizer_config.json",
        {
            **specials,
            "chat_template": _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": longest,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
