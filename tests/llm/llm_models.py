"""A tokenizer trained on Python's own documentation, as GGUF metadata, and models that use it."""

import functools
import json
import pydoc_data.topics
import re

from tiny_decoder import TinyModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def documentation():
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


@functools.cache
def trained(size=600):
    """Vocabulary and merges of byte-level pair merging."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        documentation()[:12],
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return json.loads(tokenizer.to_str())["model"]


def metadata(pre="gpt-2", **changes):
    """What a GGUF file says of this tokenizer; `<think>` is user-defined, the others control."""
    model = trained()
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    names = {"<think>": 4} | dict.fromkeys(SPECIAL[:3], 3)
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [names.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def model(slots=2, context=128, seed=0, **changes):
    return TinyModel(
        metadata(**changes), slots, context, len(metadata()["tokenizer.ggml.tokens"]), seed
    )


def mixed_text():
    """Prose, code and what tokenizers find hard."""
    hard = (
        "naïve café 日本語、漢字 안녕하세요 Привет 🙂👩‍👩‍👧 ½ ² ٣ \u200b\u00a0x\r\n\t\ty",
        "\n\n\n  z   12345 ",
        "it's I'LL we've'd <|im_end|> <think> </s>   \n \t\n",
        "a" * 300 + " " * 77 + "x",
        "",
        "\x00\x01\x7f",
    )
    return [*documentation()[12:20], *hard, re.sub(r"[aeiou]", "", documentation()[3])]
