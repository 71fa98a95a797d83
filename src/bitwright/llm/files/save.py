"""`save_model`: writes a language model in the format of the suffix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bitwright.errors import ExportError
from bitwright.frontend.language.source import ModelSource, read_source
from bitwright.ir import container
from bitwright.llm.files.gguf import write_gguf

SUFFIXES = (".bw", ".gguf")


def save_model(source: ModelSource, path: str | Path) -> None:
    """Write a model as .bw (a graph with its tokenizer and report) or .gguf (llama.cpp reads it).

    Weights keep the format that they have. The file appears when it is complete.
    """
    suffix = Path(path).suffix
    if suffix == ".bw":
        container.save(source.saved_graph(), path)
    elif suffix == ".gguf":
        write_gguf(source, path)
    else:
        raise ExportError(
            f"no format of language models is known for {Path(path).name!r}",
            expected=" or ".join(SUFFIXES),
        )


def remember(path: str | Path, key: str, value: Any) -> None:
    """Add a measured figure to the report of a saved model."""
    source = read_source(path)
    save_model(replace(source, report={**source.report, key: value}), path)
