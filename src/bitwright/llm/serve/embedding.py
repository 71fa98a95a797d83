"""/v1/embeddings, with an encoder."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.compiler import compile
from bitwright.errors import RunError
from bitwright.llm.serve.fields import Fields
from bitwright.llm.serve.settings import ApiError
from bitwright.llm.text.source import read_tokenizer
from bitwright.llm.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
MAX_INPUTS = 2048
_ROWS = 8192
"""Positions of one run, padding included."""


class Embedder:
    """Vectors of texts: `encoder` is what `load_encoder` returned."""

    def __init__(self, encoder: Any, threads: int | None = None, target: str = "cpu") -> None:
        self._encoder, self.name = encoder, encoder.name
        self._executable = compile(encoder.graph, target=target, threads=threads)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._encoder.tokenizer_source)

    def tokens(self, text: str | Sequence[int]) -> list[int]:
        """Tokens as the encoder expects them; given tokens stay as they are."""
        if not isinstance(text, str):
            self.tokenizer.check(text)
            rows = self._encoder.config.vocab  # a tokenizer may have more tokens than the model
            if max(text, default=0) >= rows:
                raise RunError(
                    f"token {max(text)} is not in the model's vocabulary",
                    expected=f"0 to {rows - 1}",
                )
            return list(text)
        special = self.tokenizer.special
        begin = [] if special.begin is None else [special.begin]
        end = [] if special.separator is None else [special.separator]
        return [*begin, *self.tokenizer.encode(text), *end]

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[Array]:
        """The vector of each list of tokens; lists of like length run together."""
        limit = self._encoder.config.context
        longest = max(map(len, inputs))
        if longest > limit:
            raise RunError(
                "the text does not fit the context",
                expected=f"at most {limit} tokens",
                found=longest,
            )
        found: list[Array | None] = [None] * len(inputs)
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        while order:
            width = len(inputs[order[-1]])
            batch = [order.pop() for _ in range(min(len(order), max(1, _ROWS // max(width, 1))))]
            tokens = np.zeros((len(batch), width), np.int32)
            mask = np.zeros((len(batch), width), np.int32)
            for row, i in enumerate(batch):
                tokens[row, : len(inputs[i])], mask[row, : len(inputs[i])] = inputs[i], 1
            types = self._executable.inputs
            given = {"tokens": tokens, "mask": mask}
            feeds = {n: a.astype(types[n].dtype.numpy) for n, a in given.items()}  # type: ignore[union-attr]
            vectors = self._executable.run(feeds)["embedding"]
            for row, i in enumerate(batch):
                found[i] = vectors[row]
        return [vector for vector in found if vector is not None]


def embedding_answer(embedder: Embedder, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a body of /v1/embeddings."""
    fields = Fields(body, ("user", "model"))
    given = fields.take("input", (str, list))
    form = fields.take("encoding_format", str, "float")
    size = fields.take("dimensions", int, None)
    fields.finish()
    if form not in ("float", "base64"):
        raise ApiError(400, "encoding_format is float or base64", param="encoding_format")
    is_one = isinstance(given, str) or (bool(given) and all(type(one) is int for one in given))
    inputs = [given] if is_one else given
    if not 1 <= len(inputs) <= MAX_INPUTS or not all(_is_input(one) for one in inputs):
        raise ApiError(
            400, f"input is a text or tokens, or 1 to {MAX_INPUTS} of them", param="input"
        )
    tokens = [embedder.tokens(one) for one in inputs]
    vectors = embedder.embed(tokens)
    if size not in (None, len(vectors[0])):
        raise ApiError(
            400, f"this model's embeddings have {len(vectors[0])} dimensions", param="dimensions"
        )
    count = sum(map(len, tokens))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, form)}
            for index, vector in enumerate(vectors)
        ],
        "model": embedder.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _is_input(one: Any) -> bool:
    if isinstance(one, str):
        return bool(one)
    return isinstance(one, list) and bool(one) and all(type(token) is int for token in one)


def _written(vector: Array, form: str) -> list[float] | str:
    values = vector.astype("<f4")
    return values.tolist() if form == "float" else base64.b64encode(values.tobytes()).decode()
