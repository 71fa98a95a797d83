"""/v1/embeddings, with an encoder or a decoder."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.llm.embeddings import Check, DecoderEmbedder, Embedder
from bitwright.llm.serve.fields import Fields
from bitwright.llm.serve.settings import ApiError

Array = np.ndarray[Any, Any]
MAX_INPUTS = 2048


def embedding_answer(
    embedder: Embedder | DecoderEmbedder, body: Mapping[str, Any], before_run: Check = None
) -> dict[str, Any]:
    """The answer to a body of /v1/embeddings; `before_run` is called before each run."""
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
    vectors = embedder.embed(tokens, before_run)
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
