"""Loads a language model for running: `load_model` for decoders, `load_encoder` for encoders.

model = load_model("model.gguf", context=2048, slots=4)
model.graph                      # tokens, slot, position, rows -> logits; states k.*, v.*
model.graph_for(slots=1)         # another cache, the same weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.decoder import CacheShape
from bitwright.frontend.language.source import DEFAULT_CONTEXT, ModelSource, read_source
from bitwright.ir import Graph


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """A decoder, its weights still in the mapped file.

    `tokenizer_source` is the metadata of a GGUF file, or the path of a `tokenizer.json` whose
    folder also holds its configuration and chat template; None if the model has no tokenizer.
    """

    source: ModelSource
    cache: CacheShape
    exact: bool = False
    output: str = "logits"
    """What the graph computes for the wanted rows: "logits", or "hidden" states."""

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def name(self) -> str:
        return self.config.name or self.source.path.stem

    @property
    def context(self) -> int:
        return self.cache.context

    @property
    def slots(self) -> int:
        return self.cache.slots

    @property
    def report(self) -> Mapping[str, Any]:
        """Measured figures that the file holds, such as its perplexity."""
        return self.source.report

    @cached_property
    def graph(self) -> Graph:
        return self.graph_for()

    def graph_for(self, slots: int | None = None, context: int | None = None) -> Graph:
        """The graph with a cache of another size."""
        cache = CacheShape(
            self.cache.slots if slots is None else slots,
            self.cache.context if context is None else context,
            self.cache.element,
        )
        return self.source.graph(cache, self.exact, self.output)

    def for_hidden_states(self, slots: int) -> DecoderModel:
        """The model with states instead of logits."""
        return replace(self, cache=replace(self.cache, slots=slots), output="hidden")

    @cached_property
    def tokenizer_source(self) -> Mapping[str, Any] | Path | None:
        return self.source.tokenizer.open()


@dataclass(frozen=True, eq=False)
class EncoderModel:
    """An encoder: tokens[b, s], mask[b, s] -> hidden[b, s, width], embedding[b, width]."""

    source: ModelSource
    exact: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def name(self) -> str:
        return self.config.name or self.source.path.stem

    @cached_property
    def graph(self) -> Graph:
        return self.source.graph(exact=self.exact)

    @cached_property
    def tokenizer_source(self) -> Mapping[str, Any] | Path | None:
        return self.source.tokenizer.open()


def load_model(
    path: str | Path,
    context: int | None = None,
    cache: str = "f16",
    slots: int = 1,
    exact: bool = False,
    dequantize: bool = False,
) -> DecoderModel:
    """The decoder at a path: a GGUF file, a Hugging Face folder, or a .bw file.

    `context` positions are kept for each of `slots` sequences; None means what the model was
    trained for, 4096 at most. `exact` multiplies activations as floats instead of in 8 bits.
    `dequantize` accepts formats without a kernel, in f16.
    """
    source = read_source(path, dequantize)
    if source.config.is_encoder:
        raise BitwrightError(
            f"{path} is an encoder, which generates no text",
            hint="Use load_encoder, or `bitwright serve` for embeddings.",
        )
    if context is None:
        context = min(source.config.context, DEFAULT_CONTEXT)
    if not 1 <= context <= source.config.context:
        raise BitwrightError(
            "the context does not fit the model",
            where=str(path),
            expected=f"1 to {source.config.context}, which the model was trained for",
            found=context,
        )
    return DecoderModel(source, CacheShape(slots, context, cache), exact)


def load_encoder(path: str | Path, exact: bool = False, dequantize: bool = False) -> EncoderModel:
    """The encoder at a path: a GGUF file, a Hugging Face folder, or a .bw file."""
    source = read_source(path, dequantize)
    if not source.config.is_encoder:
        raise BitwrightError(f"{path} is no encoder", hint="Use load_model.")
    return EncoderModel(source, exact)
