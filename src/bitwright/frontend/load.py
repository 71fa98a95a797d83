"""`bw.load`: reads a model of any supported format, which its first bytes identify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend import onnx, torch
from bitwright.frontend.language.source import is_language_model, read_source
from bitwright.frontend.unsupported_formats import refuse_unsupported_formats
from bitwright.ir import Graph, container
from bitwright.ir.parser import parse
from bitwright.ops.core.check import verify


def load(model: Any) -> Graph:
    """A graph from a path (.onnx, .bw, .txt), the bytes of an ONNX file, or a ModelProto.

    A quantized model gives the graph that it has; a program of `torch.export` is imported. A
    language model (a GGUF file, or a Hugging Face folder) gives the graph that
    `bitwright.frontend.language` describes, with a cache for one sequence.
    """
    return load_with_files(model)[0]


def load_with_files(model: Any) -> tuple[Graph, tuple[Path, ...]]:
    """A graph, and the external files that hold its weights."""
    graph = getattr(model, "graph", model)  # `ModelProto.graph` is a GraphProto
    if isinstance(graph, Graph):
        return graph, ()
    if torch.is_program(model):
        return torch.from_torch(model), ()
    if torch.is_module(model):
        return torch.from_module(model), ()
    if not isinstance(model, (str, Path)):
        return onnx.load_with_files(model)
    path = Path(model)
    if is_language_model(path):
        return verify(read_source(path).graph()), _files(path)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ImportModelError(f"cannot read {path}: it is not a regular file")
        with open(path, "rb") as file:
            start = file.read(8)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImportModelError(f"cannot read {path}: {reason}") from None
    if start == container.MAGIC:
        return verify(container.load(path)), ()
    if path.suffix == ".txt" or start.startswith(b"graph @"):
        return verify(parse(_text(path))), ()
    refuse_unsupported_formats(path, start)
    return onnx.load_with_files(path)


def _files(path: Path) -> tuple[Path, ...]:
    """The files of a folder that hold its weights."""
    return tuple(sorted(path.glob("*.safetensors"))) if path.is_dir() else ()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ImportModelError(f"cannot read {path} as text: {error}") from None
