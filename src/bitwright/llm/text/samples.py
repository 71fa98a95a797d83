"""Samples of a tokenizer: texts with their tokens, stored in files and checked when they are read.

A tokenizer consists of data and of what a library makes of them; samples show where the two do not
fit any more. Files hold them as JSON, [[text, [token, …]], …].
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from bitwright.errors import ImportModelError, RunError
from bitwright.frontend.language.source import SAMPLES_FILE, SAMPLES_KEY
from bitwright.llm.text.tokenizer import Tokenizer

__all__ = ["SAMPLES_FILE", "SAMPLES_KEY", "check_samples", "samples_of"]
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's what we'll say: they'd've known, I'M sure.",
    "  two spaces,\ttab\n\n\nand lines \r\n  ",
    "3.14159 and 1234567890, 007 x 42%",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # why?\n",
    "naïve café, Привет, 日本語 안녕하세요 ½",
    "🙂👩\u200d👧 \u00a0\u200b …",
    "https://example.org/a?b=c&d=%20#e <tag/> </s> <|im_end|>",
)
MAX_SAMPLES, MAX_TEXT = 256, 4096


def samples_of(tokenizer: Tokenizer) -> str:
    """The samples of a tokenizer, as files hold them: of texts for which it has tokens."""
    found = []
    for text in TEXTS:
        with suppress(RunError):
            found.append([text, tokenizer.encode(text)])
    return json.dumps(found)


def check_samples(tokenizer: Tokenizer, samples: Any, where: str) -> None:
    """Raise if the tokenizer gives other tokens than the samples of its file."""
    for text, expected in _parsed(samples, where):
        try:
            found = tokenizer.encode(text)
        except RunError as error:
            raise ImportModelError(
                f"a sample of the tokenizer fails: {error}", where=where
            ) from None
        if found != expected:
            place = next(
                (
                    i
                    for i, pair in enumerate(zip(found, expected, strict=False))
                    if len({*pair}) > 1
                ),
                min(len(found), len(expected)),
            )
            raise ImportModelError(
                f"the tokenizer gives other tokens for {text!r} than the file says",
                where=where,
                expected=f"{expected[place : place + 4]} at token {place}",
                found=found[place : place + 4],
                hint="The file is damaged or was changed, or the tokenizers library cuts text "
                "otherwise than the one that the file was written with.",
            )


def _parsed(samples: Any, where: str) -> list[tuple[str, list[int]]]:
    try:
        rows = json.loads(samples)
        if not isinstance(rows, list) or len(rows) > MAX_SAMPLES:
            raise ValueError(f"expected a list of at most {MAX_SAMPLES}")
        found = []
        for text, tokens in rows:
            is_text = isinstance(text, str) and len(text) <= MAX_TEXT
            if not is_text or not all(type(token) is int for token in tokens):
                raise ValueError("expected texts and their tokens")
            text.encode()  # raises for half of a surrogate pair
            found.append((text, list(tokens)))
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise ImportModelError(
            f"the samples of the tokenizer are damaged: {error}", where=where
        ) from None
