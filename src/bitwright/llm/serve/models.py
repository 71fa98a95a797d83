"""Opens what a server is asked to serve: language models, encoders, and other models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwright.compiler import compile
from bitwright.errors import BitwrightError, ImportModelError
from bitwright.frontend.language.source import ModelSource, is_language_model, read_source
from bitwright.llm.embeddings import Embedder
from bitwright.llm.language_model import LanguageModel
from bitwright.llm.model import load_encoder
from bitwright.llm.serve.app import Model

_TOKENS = "tokenizer.ggml.tokens"


def open_model(path: str | Path, threads: int | None = None, **options: Any) -> Model:
    """The model at a path, ready to be served. `options` are those of `LanguageModel`."""
    path = Path(path)
    if not path.exists():
        raise BitwrightError(f"there is no file or folder {path}")
    source = _language_source(path)
    if source is None:
        return compile(path, threads=threads)
    if source.config.is_encoder:
        return Embedder(load_encoder(path), threads)
    model = LanguageModel(path, threads, **options)
    tokens = model.model.tokenizer_source
    if tokens is not None and (not isinstance(tokens, Mapping) or _TOKENS in tokens):
        _ = model.tokenizer  # what is wrong with it is an error now, not in a request
    return model


def _language_source(path: Path) -> ModelSource | None:
    """The language model at a path; None if it is another model."""
    if is_language_model(path):
        return read_source(path)
    if path.suffix == ".bw":
        with suppress(ImportModelError):
            return read_source(path)
    return None


def open_models(
    arguments: Iterable[str], threads: int | None = None, **options: Any
) -> dict[str, Model]:
    """Models by name, from `NAME=PATH` or paths."""
    found: dict[str, Model] = {}
    for argument in arguments:
        name, path = name_and_path(argument)
        if name in found:
            raise BitwrightError(
                f"two models are named {name!r}", hint="Name them apart: NAME=PATH."
            )
        found[name] = open_model(path, threads, **options)
    return found


def name_and_path(argument: str) -> tuple[str, str]:
    """Name and path of `NAME=PATH`, or of a path alone."""
    name, sign, path = argument.partition("=")
    if not sign or Path(argument).exists():
        return Path(argument).stem, argument
    if not name or not path:
        raise BitwrightError(f"{argument!r} is not NAME=MODEL")
    return name, path
