"""Perplexity of a language model on text: exp of the mean negative log-likelihood of its tokens.

Text is cut into windows of equal length. Every token behind the first of its window counts; it is
predicted from the tokens before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compiler import compile
from bitwright.errors import BitwrightError
from bitwright.llm.model import DecoderModel, load_model
from bitwright.llm.text.source import read_tokenizer

Array = np.ndarray[Any, Any]
WINDOW = 512
ROWS = 64
"""Rows whose logits are in memory together."""


@dataclass(frozen=True)
class Perplexity:
    value: float
    tokens: int
    window: int
    exact: bool
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        form = "exact" if self.exact else "default"
        return f"{self.value:.4f} ({form} form, {self.tokens} tokens, windows of {self.window})"


def tokens_of_text(model: DecoderModel, text: str) -> list[int]:
    """The tokens of a text by the model's own tokenizer."""
    source = model.tokenizer_source
    if source is None:
        raise BitwrightError(f"{model.name} has no tokenizer", hint="Give tokens instead of text.")
    return read_tokenizer(source).encode(text)


def perplexity(
    model: DecoderModel | str | Path,
    text: str | Sequence[int] | Array,
    window: int = WINDOW,
    tokens: int | None = None,
    threads: int | None = None,
    exact: bool | None = None,
    label: str = "",
) -> Perplexity:
    """The perplexity of a model on a text or its tokens; at most the first `tokens` of them.

    `exact` multiplies activations as floats; None leaves it as the model was loaded.
    """
    if not isinstance(model, DecoderModel):
        model = load_model(model, exact=bool(exact))
    elif exact is not None and exact != model.exact:
        model = DecoderModel(model.source, model.cache, exact)
    ids = np.asarray(tokens_of_text(model, text) if isinstance(text, str) else text, np.int32)
    ids = ids.reshape(-1)[:tokens]
    window = min(window, model.config.context, max(len(ids), 1))
    if len(ids) < 2 or window < 2:
        raise BitwrightError("the text is too short", expected="at least 2 tokens", found=len(ids))
    if ids.min() < 0 or ids.max() >= model.config.vocab:
        raise BitwrightError(
            "a token lies outside the vocabulary", expected=f"0 to {model.config.vocab - 1}"
        )
    exe = compile(model.graph_for(slots=1, context=window), threads=threads)
    total, count = 0.0, 0
    for begin in range(0, len(ids) - 1, window):
        part = ids[begin : begin + window]
        for start in range(0, len(part) - 1, ROWS):
            rows = part[start : start + ROWS]
            targets = part[start + 1 : start + 1 + len(rows)]
            logits = exe.run(_feeds(rows, start, len(targets)))["logits"]
            total += float(negative_log_likelihood(logits, targets).sum())
            count += len(targets)
    value = math.exp(min(total / count, 700.0))
    return Perplexity(value, count, window, model.exact, label)


def _feeds(tokens: Array, start: int, wanted: int) -> dict[str, Array]:
    places = np.arange(len(tokens), dtype=np.int32)
    return {
        "tokens": tokens,
        "slot": np.zeros(len(tokens), np.int32),
        "position": places + np.int32(start),
        "rows": places[:wanted],
    }


def negative_log_likelihood(logits: Array, targets: Array) -> Array:
    """-log softmax(logits)[target] of each row, in f64."""
    peak = logits.max(axis=1, keepdims=True).astype(np.float64)
    sums = np.exp(logits - peak.astype(logits.dtype)).sum(axis=1, dtype=np.float64)
    chosen = np.take_along_axis(logits, targets[:, None].astype(np.int64), axis=1)[:, 0]
    return np.asarray(np.log(sums) + peak[:, 0] - chosen)
