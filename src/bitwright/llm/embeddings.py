"""Embeddings: one vector for each text.

    embedder = open_embedder("model.gguf")           # an encoder or a decoder
    vectors = embedder.embed_texts(["a text", "another"])       # f32[2, width], of length 1

A decoder's vector is the state of the last token behind the final norm, or the mean over all
tokens (`pooling`), as the model's files say; the last token's where they say nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compiler import compile
from bitwright.errors import BitwrightError, RunError
from bitwright.frontend.language.source import read_source
from bitwright.llm.engine.compiled import compile_model
from bitwright.llm.engine.decoder import Decoder
from bitwright.llm.engine.engine import CHUNK
from bitwright.llm.model import DecoderModel, load_encoder, load_model
from bitwright.llm.text.source import read_tokenizer
from bitwright.llm.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
Check = Callable[[], None] | None
_ROWS = 8192
"""Positions of one run, padding included."""
_SLOTS = 8
"""Texts that a decoder embeds together."""
POOLINGS = ("last", "mean", "cls")


class _TextEmbedder:
    """What embedders of both kinds do with text."""

    name: str
    model: Any

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = self.model.tokenizer_source
        if source is None:
            raise BitwrightError(f"the model {self.name!r} has no tokenizer", hint="Give tokens.")
        return read_tokenizer(source)

    def tokens(self, text: str | Sequence[int]) -> list[int]:
        """Tokens as the model expects them; given tokens stay as they are."""
        if isinstance(text, str):
            return self._tokens_of(text)
        rows = self.model.config.vocab  # a tokenizer may have more tokens than the model
        wrong = [token for token in text if not 0 <= token < rows]
        if wrong:
            raise RunError(
                f"token {wrong[0]} is not in the model's vocabulary",
                expected=f"0 to {rows - 1}",
            )
        return list(text)

    def _tokens_of(self, text: str) -> list[int]:
        raise NotImplementedError

    def embed(self, inputs: Sequence[Sequence[int]], before_run: Check = None) -> list[Array]:
        """The vector of each list of tokens. `before_run` is called before each run of the model;
        what it raises ends the work."""
        raise NotImplementedError

    def embed_texts(self, texts: Iterable[str | Sequence[int]]) -> Array:
        """f32[texts, width]"""
        inputs = [self.tokens(text) for text in texts]
        if not inputs:
            return np.zeros((0, self.model.config.width), np.float32)
        return np.stack(self.embed(inputs))


def check_lengths(inputs: Sequence[Sequence[int]], limit: int) -> None:
    """Raise if a list of tokens is empty or longer than the context."""
    for place, tokens in enumerate(inputs):
        if not len(tokens):
            raise RunError("a text without tokens has no embedding", where=f"text {place}")
    longest = max(map(len, inputs), default=0)
    if longest > limit:
        raise RunError(
            "the text does not fit the context",
            expected=f"at most {limit} tokens",
            found=longest,
        )


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Texts that a decoder embeds together, by their numbers: short ones that fit one run.

    A long text is alone, in the first slot, so that the cache of one slot only grows to its length.
    """
    found: list[list[int]] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        room -= lengths[number]
        if room < 0 or len(found[-1]) == _SLOTS:
            found.append([])
            room = CHUNK - lengths[number]
        found[-1].append(number)
    return found


class Embedder(_TextEmbedder):
    """Vectors of texts by an encoder: `encoder` is what `load_encoder` returned."""

    def __init__(self, encoder: Any, threads: int | None = None, target: str = "cpu") -> None:
        self.model, self.name = encoder, encoder.name
        self._executable = compile(encoder.graph, target=target, threads=threads)

    def _tokens_of(self, text: str) -> list[int]:
        special = self.tokenizer.special
        begin = [] if special.begin is None else [special.begin]
        end = [] if special.separator is None else [special.separator]
        return [*begin, *self.tokenizer.encode(text), *end]

    def embed(self, inputs: Sequence[Sequence[int]], before_run: Check = None) -> list[Array]:
        """The vector of each list of tokens; lists of like length run together."""
        check_lengths(inputs, self.model.config.context)
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
            if before_run is not None:
                before_run()
            vectors = self._executable.run(feeds)["embedding"]
            for row, i in enumerate(batch):
                found[i] = vectors[row]
        return [vector for vector in found if vector is not None]


class DecoderEmbedder(_TextEmbedder):
    """Vectors of texts by a decoder: `model` is what `load_model` returned.

    `pooling` is "last", "mean" or "cls" (the first token's state); None takes what the model's
    files say. `normalize` makes vectors of length 1. `path` is where the model was loaded from
    as it is; its compiled form is then kept in the cache folder.
    """

    def __init__(
        self,
        model: DecoderModel,
        threads: int | None = None,
        pooling: str | None = None,
        normalize: bool = True,
        target: str = "cpu",
        path: str | Path | None = None,
    ) -> None:
        stated = model.config.pooling
        pooling = pooling or (stated if stated in POOLINGS else "last")
        if pooling not in POOLINGS:
            raise BitwrightError(
                f"there is no pooling {pooling!r}", expected=", ".join(map(repr, POOLINGS))
            )
        self.model, self.name = model, model.name
        self.pooling, self.normalize = pooling, normalize
        self._lock = threading.Lock()
        hidden = model.for_hidden_states(_SLOTS)
        cache = hidden.cache
        layout = f"hidden context={cache.context} cache={cache.element} exact={model.exact}"
        path = None if path is None else Path(path)
        executable = compile_model(hidden, path, layout, threads, target)
        self._decoder = Decoder(executable, "hidden")

    def _tokens_of(self, text: str) -> list[int]:
        final = self.tokenizer.special.final
        return self.tokenizer.prompt(text) + ([] if final is None else [final])

    def embed(self, inputs: Sequence[Sequence[int]], before_run: Check = None) -> list[Array]:
        """The vector of each list of tokens, several in one run."""
        check_lengths(inputs, self._decoder.context)
        found: dict[int, Array] = {}
        with self._lock:
            for batch in batches([len(one) for one in inputs]):
                vectors = self._together([inputs[i] for i in batch], before_run)
                found |= dict(zip(batch, vectors, strict=True))
        return [found[i] for i in range(len(inputs))]

    def _together(self, inputs: Sequence[Sequence[int]], before_run: Check) -> list[Array]:
        """Each input has a slot; runs take `CHUNK` rows, of one input after the other."""
        slot = np.repeat(np.arange(len(inputs), dtype=np.int32), [len(one) for one in inputs])
        tokens = np.concatenate([np.asarray(one, np.int32) for one in inputs])
        position = np.concatenate([np.arange(len(one), dtype=np.int32) for one in inputs])
        length = np.array([len(one) for one in inputs], np.int32)[slot]
        wanted = {
            "mean": np.ones(len(tokens), bool),
            "last": position == length - 1,
            "cls": position == 0,
        }[self.pooling]
        sums = np.zeros((len(inputs), self.model.config.width), np.float64)
        for begin in range(0, len(tokens), CHUNK):
            part = slice(begin, begin + CHUNK)
            rows = np.flatnonzero(wanted[part])
            asked = rows if len(rows) else np.zeros(1, np.int64)  # a run has at least one row
            if before_run is not None:
                before_run()
            states = self._decoder.run(tokens[part], slot[part], position[part], asked)
            np.add.at(sums, slot[part][rows], states[: len(rows)])
        if self.pooling == "mean":
            sums /= np.array([len(one) for one in inputs])[:, None]
        if self.normalize:
            sums /= np.maximum(np.sqrt(np.square(sums).sum(1, keepdims=True)), 1e-12)
        return list(sums.astype(np.float32))


def open_embedder(
    path: str | Path,
    threads: int | None = None,
    *,
    pooling: str | None = None,
    normalize: bool = True,
    context: int | None = None,
    exact: bool = False,
) -> Embedder | DecoderEmbedder:
    """The embedder of the model at a path; the options after `threads` are a decoder's."""
    if read_source(path).config.is_encoder:
        return Embedder(load_encoder(path, exact=exact), threads)
    model = load_model(path, context=context, exact=exact)
    return DecoderEmbedder(model, threads, pooling, normalize, path=path)
