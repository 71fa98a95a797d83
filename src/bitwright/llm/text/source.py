"""The tokenizer and chat template of a loaded model, wherever they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.llm.text.file_tokenizer import chat_template_beside, tokenizer_of_file
from bitwright.llm.text.gguf_tokenizer import tokenizer_of_metadata
from bitwright.llm.text.tokenizer import Tokenizer

Source = Mapping[str, Any] | str | Path


def read_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer of GGUF metadata, or of a tokenizer.json."""
    if isinstance(source, Mapping):
        return tokenizer_of_metadata(source)
    return tokenizer_of_file(source)


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
