"""The tokenizer of a Hugging Face folder as metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bitwright.errors import ExportError, ImportModelError, UnsupportedError
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.source import SAMPLES_FILE, SAMPLES_KEY, TokenizerSource
from bitwright.llm.text.source import read_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_P = "tokenizer.ggml."


def tokenizer_metadata(source: TokenizerSource, config: ModelConfig) -> dict[str, Any]:
    """Metadata of a byte-level or sentencepiece BPE tokenizer; a model may have none."""
    if source.metadata:
        return dict(source.metadata)
    files = source.texts()
    if "tokenizer.json" not in files:
        return {f"{_P}model": "none"}
    try:
        data = json.loads(files["tokenizer.json"])
        settings = json.loads(files.get("tokenizer_config.json", "{}"))
        found = _of_tokenizer(data, settings, config)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ExportError(f"tokenizer.json is not understood: {error}") from None
    if SAMPLES_FILE in files:
        found[SAMPLES_KEY] = files[SAMPLES_FILE]
        try:
            read_tokenizer(found)
        except UnsupportedError:
            del found[SAMPLES_KEY]  # nobody here reads this kind
        except ImportModelError as error:
            raise ExportError(
                f"a GGUF file cannot hold this tokenizer: {error}", hint="Save the model as .bw."
            ) from None
    return found


def _of_tokenizer(
    data: Mapping[str, Any], settings: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
    model = data["model"]
    if model.get("type") != "BPE":
        raise ExportError(
            "only BPE tokenizers are written to GGUF files",
            found=model.get("type"),
            hint="Save the model as .bw.",
        )
    tokens = {int(number): str(token) for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in data.get("added_tokens") or []:
        number = int(added["id"])
        tokens[number] = str(added["content"])
        kinds[number] = CONTROL if added.get("special") else USER_DEFINED
    is_sentencepiece = bool(model.get("byte_fallback"))
    if is_sentencepiece:
        for number, token in tokens.items():
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                kinds[number] = BYTE
    count = max(config.vocab, max(tokens) + 1)
    found: dict[str, Any] = {
        f"{_P}model": "llama" if is_sentencepiece else "gpt2",
        f"{_P}tokens": [tokens.get(i, f"[PAD{i}]") for i in range(count)],
        f"{_P}token_type": [kinds.get(i, UNUSED) for i in range(count)],
    }
    if is_sentencepiece:
        found[f"{_P}scores"] = [float(-i) for i in range(count)]
        found[f"{_P}add_space_prefix"] = _prepends_space(data)
    else:
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        found |= {f"{_P}merges": merges, f"{_P}pre": kind_of_split(data.get("pre_tokenizer"))}
    if config.bos is not None:
        found[f"{_P}bos_token_id"] = config.bos
    if config.eos:
        found[f"{_P}eos_token_id"] = config.eos[0]
    if isinstance(settings.get("add_bos_token"), bool):
        found[f"{_P}add_bos_token"] = settings["add_bos_token"]
    if isinstance(settings.get("chat_template"), str):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found


def _prepends_space(data: Mapping[str, Any]) -> bool:
    return '"Prepend"' in json.dumps(data.get("normalizer")) or '"prepend_scheme": "first"' in (
        json.dumps(data.get("pre_tokenizer"))
    )


def kind_of_split(part: Mapping[str, Any] | None) -> str:
    """What GGUF files call the way a byte-level tokenizer cuts text into words."""
    steps = (part or {}).get("pretokenizers") or [part or {}]
    kinds = [step.get("type") for step in steps]
    patterns = [json.dumps(step.get("pattern"), ensure_ascii=False) for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds[:1] == ["Split"] and kinds[-1] == "ByteLevel" and len(kinds) == 2:
        if r"\\p{N}{1,3}" in patterns[0] and "\\\\p{Lu}" not in patterns[0]:
            return "llama-bpe"
        if r"\\p{N}|" in patterns[0] and "\\\\p{Lu}" not in patterns[0]:
            return "qwen2"
    raise ExportError(
        "GGUF files have no known name for how this tokenizer cuts text",
        found=kinds,
        hint="Save the model as .bw.",
    )
