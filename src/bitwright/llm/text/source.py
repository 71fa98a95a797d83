"""The tokenizer and chat template of a loaded model, wherever they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.llm.text.file_tokenizer import chat_template_beside, tokenizer_of_file
from bitwright.llm.text.gguf_tokenizer import tokenizer_of_metadata
from bitwright.llm.text.samples import SAMPLES_FILE, SAMPLES_KEY, check_samples
from bitwright.llm.text.tokenizer import Tokenizer

Source = Mapping[str, Any] | str | Path


def read_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer of GGUF metadata, or of a tokenizer.json; its samples are checked."""
    if isinstance(source, Mapping):
        tokenizer = tokenizer_of_metadata(source)
        if SAMPLES_KEY in source:
            check_samples(tokenizer, source[SAMPLES_KEY], SAMPLES_KEY)
        return tokenizer
    tokenizer = tokenizer_of_file(source)
    samples = Path(source).parent / SAMPLES_FILE
    if samples.exists():
        try:
            text = samples.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ImportModelError(
                f"the samples of the tokenizer cannot be read: {error}"
            ) from None
        check_samples(tokenizer, text, str(samples))
    return tokenizer


def read_template(source: Source | None) -> str | None:
    """The text of the chat template; None if there is none."""
    if source is None:
        return None
    if not isinstance(source, Mapping):
        return chat_template_beside(source)
    found = source.get("tokenizer.chat_template")
    if found is None or isinstance(found, str):
        return found
    raise ImportModelError("the chat template is not a text", where="tokenizer.chat_template")
