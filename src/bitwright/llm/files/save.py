"""`save_model`: writes a language model in the format of the suffix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError, ExportError
from bitwright.frontend.language.source import ModelSource, TokenizerSource
from bitwright.ir import container
from bitwright.llm.files.gguf import write_gguf
from bitwright.llm.files.onnx import write_onnx
from bitwright.llm.text.samples import SAMPLES_FILE, SAMPLES_KEY, samples_of
from bitwright.llm.text.source import read_tokenizer

SUFFIXES = (".bw", ".gguf", ".onnx")


def save_model(source: ModelSource, path: str | Path, **options: Any) -> None:
    """Write a model as .bw (a graph with its tokenizer and report), .gguf (llama.cpp reads it) or
    .onnx (ONNX Runtime runs it), which takes the options of `write_onnx`.

    Weights keep the format that they have; in ONNX their integers. The file appears when it is
    complete.
    """
    suffix = Path(path).suffix
    if suffix == ".onnx":
        return write_onnx(source, path, **options)
    if options:
        raise ExportError(f"{suffix} files have no option {next(iter(options))!r}")
    if suffix not in SUFFIXES:
        raise ExportError(
            f"no format of language models is known for {Path(path).name!r}",
            expected=" or ".join(SUFFIXES),
        )
    source = with_samples(source)
    if suffix == ".bw":
        container.save(source.saved_graph(), path)
    else:
        write_gguf(source, path)


def with_samples(source: ModelSource) -> ModelSource:
    """The model with samples of its tokenizer, if it has one that can be read."""
    tokenizer = source.tokenizer
    opened = None if tokenizer.is_empty else tokenizer.open()
    if opened is None:
        return source
    try:
        samples = samples_of(read_tokenizer(opened))
    except BitwrightError:
        return source  # a kind of tokenizer that nobody here reads
    if tokenizer.metadata:
        made = replace(tokenizer, metadata={**tokenizer.metadata, SAMPLES_KEY: samples})
    else:
        made = TokenizerSource(files={**tokenizer.texts(), SAMPLES_FILE: samples})
    return replace(source, tokenizer=made)
