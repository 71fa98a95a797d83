"""A language model in a file or folder: its configuration, tensors and tokenizer.

GGUF files, Hugging Face folders, and `.bw` files that hold a language model.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.gguf.reader import MAGIC, read_gguf
from bitwright.frontend.gguf.tensor_types import BY_NAME
from bitwright.frontend.huggingface.folder import inside, is_folder, read_folder
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.decoder import CacheShape, decoder_graph
from bitwright.frontend.language.encoder import encoder_graph
from bitwright.frontend.language.from_metadata import config_from_metadata
from bitwright.frontend.language.stored import ROW_FORMAT, SCALE, StoredTensor
from bitwright.frontend.language.weights import dequantized
from bitwright.ir import Graph, container
from bitwright.ir.dtype import DTYPES
from bitwright.ops.quant.block_formats import FORMATS

CONFIG_KEY, FORMATS_KEY, TOKENIZER_KEY, REPORT_KEY = (
    f"language_model.{part}" for part in ("config", "formats", "tokenizer", "report")
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "added_tokens.json",
    "tokenizer_samples.json",
)
SAMPLES_FILE, SAMPLES_KEY = TOKENIZER_FILES[-1], "tokenizer.bitwright.samples"
"""Where texts and their tokens are: among the files of a tokenizer, or in metadata."""
DEFAULT_CONTEXT = 4096
"""Positions of a cache whose length nobody gave; fewer if the model was trained for fewer."""


@dataclass(frozen=True)
class TokenizerSource:
    """What a tokenizer is made of: metadata of a GGUF file, or files of a folder by name."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    _folders: list[tempfile.TemporaryDirectory[str]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def is_empty(self) -> bool:
        return not (self.metadata or self.files or self.folder)

    def texts(self) -> dict[str, str]:
        """The files of the tokenizer, read."""
        if self.folder is None:
            return dict(self.files)
        found = {}
        for name in TOKENIZER_FILES:
            path = inside(self.folder, name)
            if path.exists():
                found[name] = path.read_text(encoding="utf-8")
        return found

    def open(self) -> Mapping[str, Any] | Path | None:
        """Metadata, or the path of a tokenizer.json; None if the model has no tokenizer.

        Files that the model holds as text go to a temporary folder, which lives as long as this.
        """
        if self.metadata:
            return self.metadata
        if self.folder is not None:
            for name in (*TOKENIZER_FILES, "config.json"):  # what is read beside it
                inside(self.folder, name)
            path = self.folder / "tokenizer.json"
            return path if path.exists() else None
        if "tokenizer.json" not in self.files:
            return None
        if not self._folders:
            self._folders.append(tempfile.TemporaryDirectory(prefix="bitwright-tokenizer-"))
            for name in TOKENIZER_FILES:
                if name in self.files:
                    path = Path(self._folders[0].name) / name
                    path.write_text(self.files[name], encoding="utf-8")
        return Path(self._folders[0].name) / "tokenizer.json"

    def to_json(self) -> str:
        return json.dumps({"metadata": dict(self.metadata), "files": self.texts()})

    @classmethod
    def from_json(cls, text: str) -> TokenizerSource:
        try:
            data = json.loads(text)
            return cls(dict(data["metadata"]), None, dict(data["files"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ImportModelError(f"the tokenizer in the file is damaged: {error}") from None


@dataclass(frozen=True)
class ModelSource:
    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    tokenizer: TokenizerSource
    report: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the file's quality: the figures of `bitwright perplexity`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All metadata of a GGUF file."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def graph(
        self, cache: CacheShape | None = None, exact: bool = False, output: str = "logits"
    ) -> Graph:
        """The model's graph, with what another process needs in its metadata."""
        where = str(self.path)
        if self.config.is_encoder:
            return encoder_graph(self.config, self.tensors, where, exact)
        cache = cache or CacheShape(context=min(self.config.context, DEFAULT_CONTEXT))
        return decoder_graph(self.config, self.tensors, cache, where, exact, output)

    def saved_graph(self) -> Graph:
        """A graph that `.bw` files hold; `source_of_graph` is its inverse."""
        graph = self.graph()
        facts = {
            CONFIG_KEY: self.config.to_json(),
            FORMATS_KEY: json.dumps({name: _form(t) for name, t in self.tensors.items()}),
            TOKENIZER_KEY: self.tokenizer.to_json(),
            REPORT_KEY: json.dumps(dict(self.report)),
        }
        return graph.with_(meta={**graph.meta, **facts})


def _form(tensor: StoredTensor) -> list[Any]:
    return [tensor.format, list(tensor.shape)]


def is_language_model(path: Path) -> bool:
    """Whether a path is a GGUF file or a Hugging Face folder."""
    if not path.is_file():  # opening a pipe would block
        return is_folder(path)
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except (OSError, ValueError):
        return False


def read_source(path: str | Path, dequantize: bool = False) -> ModelSource:
    """The language model at a path.

    `dequantize` turns tensors whose format no kernel reads into f16; without it they are refused.
    """
    path = Path(path)
    if path.is_dir():
        if not is_folder(path):
            raise ImportModelError(f"{path} is no model: it has no config.json")
        folder = read_folder(path)
        return ModelSource(path, folder.config, folder.tensors, TokenizerSource(folder=path))
    if not path.is_file():
        reason = "it is not a regular file" if path.exists() else "there is no such file"
        raise ImportModelError(f"cannot read {path}: {reason}")
    if is_language_model(path):
        return _of_gguf(path, dequantize)
    with open(path, "rb") as start:
        if start.read(8) == container.MAGIC:
            return source_of_graph(container.load(path), path)
    raise ImportModelError(
        f"{path} is no language model", expected="a GGUF file, a Hugging Face folder or a .bw file"
    )


def _of_gguf(path: Path, dequantize: bool) -> ModelSource:
    file = read_gguf(path)
    _, config = config_from_metadata(file)
    tensors = file.tensors
    if dequantize:
        tensors = {name: _readable(tensor) for name, tensor in tensors.items()}
    tokens = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    report = _report(file.metadata.get(f"bitwright.{REPORT_KEY}"))
    return ModelSource(path, config, tensors, TokenizerSource(tokens), report, file.metadata)


def _report(text: Any) -> dict[str, Any]:
    """The report in a GGUF file that bitwright wrote."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _readable(tensor: StoredTensor) -> StoredTensor:
    """The tensor, in f16 if no kernel reads its format."""
    if tensor.format in (*FORMATS, ROW_FORMAT) or tensor.is_plain:
        return tensor
    return replace(tensor, format="F16", data=dequantized_by_package(tensor).astype(np.float16))


def dequantized_by_package(tensor: StoredTensor) -> Any:
    """f32 values of a format that only the `gguf` package knows."""
    if tensor.format in (*FORMATS, ROW_FORMAT) or tensor.is_plain:
        return dequantized(tensor)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ImportModelError(
            f"the format {tensor.format} needs the package gguf ({error})",
            hint='Install it with: pip install "bitwright[llm]".',
        ) from None
    try:
        values = dequantize(tensor.data, GGMLQuantizationType[tensor.format])
    except (KeyError, NotImplementedError):
        raise ImportModelError(f"nothing dequantizes the format {tensor.format}") from None
    return values.reshape(tensor.shape)


def source_of_graph(graph: Graph, path: Path) -> ModelSource:
    """The language model that a graph of `saved_graph` holds."""
    if CONFIG_KEY not in graph.meta:
        raise ImportModelError(f"{path} holds no language model")
    config = ModelConfig.from_json(graph.meta[CONFIG_KEY])
    try:
        formats = json.loads(graph.meta[FORMATS_KEY])
        report = json.loads(graph.meta.get(REPORT_KEY, "{}"))
        rows = {str(name): (str(kind), tuple(map(int, s))) for name, (kind, s) in formats.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImportModelError(f"{path} is damaged: {error}") from None
    tensors = {}
    values = {value.name: value.node.attrs.get("value") for value in graph.parameters}
    scales = {name: f"{name}{SCALE}" for name, (kind, _) in rows.items() if kind == ROW_FORMAT}
    for value in graph.parameters:
        if value.name in scales.values():
            continue
        kind, shape = rows.get(value.name, ("F32", ()))
        data = value.node.attrs.get("value")
        if data is None:
            raise ImportModelError(f"{path} is damaged: {value.name!r} has no value")
        scale = values.get(scales.get(value.name, ""))
        tensors[value.name] = _restored(value.name, kind, shape, data, scale, path)
    tokenizer = TokenizerSource.from_json(graph.meta.get(TOKENIZER_KEY, ""))
    return ModelSource(path, config, tensors, tokenizer, report)


def _restored(
    name: str, kind: str, shape: tuple[int, ...], data: Any, scale: Any, path: Path
) -> StoredTensor:
    """A tensor of a parameter: blocks of bytes, floats as bytes, rows of integers with their
    scales, or a vector in f32."""
    if data.shape == shape and data.dtype == "f4":
        return StoredTensor(name, "F32", shape, data)
    columns = shape[-1] if shape else 1
    form = BY_NAME.get(kind)
    if kind == ROW_FORMAT:
        fits = data.dtype == "i1" and data.shape == shape and len(shape) == 2
        fits = fits and scale is not None
        fits = fits and scale.dtype == "f4" and scale.shape == shape[:-1]
    else:
        fits = (
            form is not None
            and data.dtype == "u1"
            and columns % form.block == 0
            and data.shape == (*shape[:-1], columns // form.block * form.nbytes)
        )
    if not fits:
        raise ImportModelError(
            f"{path} is damaged: tensor {name!r} does not fit its format {kind} {list(shape)}"
        )
    if re.fullmatch("B?F[0-9]+", kind):
        data = data.view(DTYPES[kind.lower()].numpy).reshape(shape)
    return StoredTensor(name, kind, shape, data, scale)
