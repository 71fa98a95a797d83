"""`save_model`: writes a language model in the format of the suffix."""

from __future__ import annotations

from pathlib import Path

from bitwright.errors import ExportError
from bitwright.frontend.language.source import ModelSource
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
