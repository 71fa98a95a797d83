"""Quantizes a language model: one layer in floats at a time, the rest as stored.

    embedding, head      nearest values
    each layer           smoothing, then GPTQ if there is calibration text, else nearest values

Matrices of experts get nearest values. What is not a matrix stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.frontend.language.source import ModelSource, dequantized_by_package, read_source
from bitwright.frontend.language.stored import StoredTensor
from bitwright.llm.quantize.calibration import LayerRun, embedded, layer_tensors
from bitwright.llm.quantize.encoders import ENCODERS, BlockEncoder, split_rows
from bitwright.llm.quantize.gptq import gptq_blocks, output_error
from bitwright.llm.quantize.plan import (
    FORMAT_OF_WIDTH,
    Choice,
    Width,
    choose_formats,
    parse_size,
    within_budget,
)
from bitwright.llm.quantize.smoothing import smooth_layer
from bitwright.llm.text.source import read_tokenizer

Array = np.ndarray[Any, Any]
WINDOW = 256
MAX_TOKENS = 16 * WINDOW
CHUNK = 1 << 24
"""Values that are dequantized together."""


@dataclass(frozen=True)
class MatrixReport:
    name: str
    format: str
    nbytes: int
    error: float | None = None
    """|X (W - W')| / |X W| on calibration text, or without X if there was none."""
    reason: str = ""


@dataclass
class QuantizedModel:
    """A quantized language model: `save` writes .bw or .gguf."""

    source: ModelSource
    recipe: str
    matrices: list[MatrixReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def save(self, path: str | Path) -> None:
        from bitwright.llm.files.save import save_model  # it imports the exporters

        save_model(self.source, path)

    @property
    def report(self) -> QuantizedModel:
        """What `print` shows: formats, sizes and errors."""
        return self

    def to_json(self) -> dict[str, Any]:
        rows = [vars(matrix) for matrix in self.matrices]
        return {"recipe": self.recipe, "bytes": self.nbytes, "matrices": rows}

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for matrix in self.matrices:
            counts[matrix.format] = counts.get(matrix.format, 0) + 1
        kinds = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
        lines = [f"{len(self.matrices)} matrices: {kinds}; {self.nbytes / 1e6:.1f} MB"]
        measured = [matrix for matrix in self.matrices if matrix.error is not None]
        for matrix in sorted(measured, key=lambda m: -(m.error or 0))[:5]:
            lines.append(f"  {matrix.name}: {matrix.format}, error {matrix.error:.4f}")
        lines += [f"  {m.name} stays {m.format}: {m.reason}" for m in self.matrices if m.reason]
        return "\n".join(lines)


def quantize_model(
    model: str | Path | ModelSource,
    data: str | Sequence[int] | Array | None = None,
    recipe: str = "w4",
    *,
    widths: Mapping[str, Width] | None = None,
    size_budget: str | int | None = None,
    smoothing: bool = True,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> QuantizedModel:
    """Quantize a GGUF file or a Hugging Face folder.

    `data` is calibration text, or tokens [n] or [windows, n]; without it values are rounded to the
    nearest. `widths` gives bits (4, 5, 8) or formats by pattern. `size_budget` ("90MB") chooses
    widths by measured errors instead, so that all weights fit.
    """
    begin = time.perf_counter()
    source = model if isinstance(model, ModelSource) else read_source(model, dequantize=True)
    if source.config.is_encoder and data is not None:
        raise BitwrightError("encoders are quantized without calibration data")
    choices = choose_formats(source.tensors, source.config.architecture, recipe, widths)
    windows = None if data is None else calibration_windows(source, data)
    run = _Run(source, choices, windows, smoothing, threads, progress or (lambda text: None))
    if size_budget is not None:
        budget = parse_size(size_budget)
        run.choices = within_budget(source.tensors, choices, run.measure(), budget)
    tensors = run.quantized()
    config = source.config
    result = replace(source, tensors=tensors, config=config, report={})
    return QuantizedModel(result, recipe, run.reports, time.perf_counter() - begin)


def calibration_windows(source: ModelSource, data: str | Sequence[int] | Array) -> Array:
    """Tokens [windows, n] of calibration data."""
    if isinstance(data, str):
        tokenizer = source.tokenizer.open()
        if tokenizer is None:
            raise BitwrightError("the model has no tokenizer", hint="Give tokens as data.")
        ids = np.asarray(read_tokenizer(tokenizer).encode(data), np.int32)
    else:
        ids = np.asarray(data)
        if ids.dtype.kind not in "iu" or ids.ndim > 2:
            raise BitwrightError(
                "calibration data are no tokens", expected="integers [n] or [windows, n]"
            )
    if ids.size and not (ids.min() >= 0 and ids.max() < source.config.vocab):
        raise BitwrightError(
            "a token lies outside the vocabulary", expected=f"0 to {source.config.vocab - 1}"
        )
    if ids.ndim == 1:
        width = min(WINDOW, source.config.context, max(len(ids), 1))
        ids = ids[: min(len(ids), MAX_TOKENS) // width * width].reshape(-1, width)
    if not ids.size:
        raise BitwrightError("there is no calibration text")
    return ids[:, : source.config.context].astype(np.int32)


class _Run:
    def __init__(
        self,
        source: ModelSource,
        choices: dict[str, Choice],
        windows: Array | None,
        smoothing: bool,
        threads: int | None,
        progress: Callable[[str], None],
    ) -> None:
        self.source, self.choices, self.windows = source, choices, windows
        self.smoothing, self.threads, self.progress = smoothing, threads, progress
        self.reports: list[MatrixReport] = []

    def quantized(self) -> dict[str, StoredTensor]:
        """All tensors, in the order of the model."""
        found: dict[str, StoredTensor] = {}
        x = self.embedded()
        for layer in range(self.source.config.layers):
            self.progress(f"layer {layer + 1} of {self.source.config.layers}")
            done, x = self.layer(layer, x)
            found |= done
        for name, tensor in self.source.tensors.items():
            if name not in found:
                found[name] = self.matrix(tensor, None)
        return {name: found[name] for name in self.source.tensors}

    def embedded(self) -> Array | None:
        if self.windows is None:
            return None
        table = self.source.tensors["token_embd.weight"]
        return embedded(self.source.config, table, self.windows)

    def layer(self, layer: int, x: Array | None) -> tuple[dict[str, StoredTensor], Array | None]:
        """The layer's tensors, and what the next layer gets."""
        config = self.source.config
        own = layer_tensors(self.source.tensors, layer)
        if x is None:
            return {name: self.matrix(tensor, None) for name, tensor in own.items()}, None
        floats = {name: in_floats(tensor) for name, tensor in own.items()}
        context = x.shape[1]
        moments = LayerRun(config, floats, layer, context, self.threads).moments(x)
        if self.smoothing:
            floats, moments = smooth_layer(config, floats, moments, layer, self.encoders())
        done = {name: self.matrix(tensor, moments.get(name)) for name, tensor in floats.items()}
        done = {
            name: tensor if name in self.choices else self._unchanged(own[name], tensor)
            for name, tensor in done.items()
        }
        return done, LayerRun(config, done, layer, context, self.threads).outputs(x)

    def _unchanged(self, before: StoredTensor, after: StoredTensor) -> StoredTensor:
        """A vector as it was stored, unless smoothing changed it."""
        same = np.array_equal(in_floats(before).data, after.data)
        return before if same else after

    def encoders(self) -> dict[str, BlockEncoder]:
        return {
            name: ENCODERS[choice.format]
            for name, choice in self.choices.items()
            if choice.format is not None
        }

    def measure(self) -> dict[str, dict[str, float]]:
        """The relative output error of every matrix in every width."""
        errors: dict[str, dict[str, float]] = {}
        x = self.embedded()
        for layer in range(self.source.config.layers):
            self.progress(f"measuring layer {layer + 1} of {self.source.config.layers}")
            own = layer_tensors(self.source.tensors, layer)
            moments: dict[str, Array] = {}
            if x is not None:
                run = LayerRun(self.source.config, own, layer, x.shape[1], self.threads)
                moments, x = run.moments(x), run.outputs(x)
            errors |= {name: self._errors(own[name], moments.get(name)) for name in self.of(own)}
        rest = [name for name in self.of(self.source.tensors) if name not in errors]
        return errors | {name: self._errors(self.source.tensors[name], None) for name in rest}

    def of(self, tensors: Mapping[str, StoredTensor]) -> list[str]:
        return [n for n in tensors if n in self.choices and self.choices[n].format is not None]

    def _errors(self, tensor: StoredTensor, moments: Array | None) -> dict[str, float]:
        found = {}
        for kind in FORMAT_OF_WIDTH.values():
            wrong = total = 0.0
            for w in row_parts(tensor):
                values = ENCODERS[kind].dequantize(ENCODERS[kind].encode(w, _diagonal(moments)))
                wrong += _energy(w - values, moments)
                total += _energy(w, moments)
            found[kind] = wrong / max(total, 1e-30)
        return found

    def matrix(self, tensor: StoredTensor, moments: Array | None) -> StoredTensor:
        """A tensor in its chosen format, and its line of the report."""
        choice = self.choices.get(tensor.name)
        if choice is None:
            return tensor
        if choice.format is None:
            self._report(tensor, None, choice.reason)
            return tensor
        encoder = ENCODERS[choice.format]
        parts, wrong, total = [], 0.0, 0.0
        uses_gptq = moments is not None and len(tensor.shape) == 2
        for w in row_parts(tensor):
            if uses_gptq and moments is not None:
                blocks = gptq_blocks(w, moments, encoder)
            else:
                blocks = encoder.encode(w, _diagonal(moments))
            values = encoder.dequantize(blocks)
            wrong, total = wrong + _energy(w - values, moments), total + _energy(w, moments)
            parts.append(blocks)
        data, scale = np.concatenate(parts).reshape(*tensor.shape[:-1], -1), None
        if encoder.has_rows:
            data, scale = split_rows(data)
        found = StoredTensor(tensor.name, encoder.name, tensor.shape, data, scale)
        self._report(found, (wrong / max(total, 1e-30)) ** 0.5)
        return found

    def _report(self, tensor: StoredTensor, error: float | None, reason: str = "") -> None:
        row = MatrixReport(tensor.name, tensor.format, tensor.nbytes, error, reason)
        self.reports.append(row)


def _diagonal(moments: Array | None) -> Array | None:
    """The weights of square errors of the columns, 1 on average."""
    if moments is None:
        return None
    diagonal = np.asarray(np.diagonal(moments), np.float32)
    return diagonal / max(float(diagonal.mean()), 1e-30) + np.float32(1e-4)


def _energy(w: Array, moments: Array | None) -> float:
    return (
        float(np.square(w, dtype=np.float64).sum()) if moments is None else output_error(w, moments)
    )


def in_floats(tensor: StoredTensor) -> StoredTensor:
    data = np.asarray(dequantized_by_package(tensor), np.float32)
    return StoredTensor(tensor.name, "F32", tensor.shape, data)


def row_parts(tensor: StoredTensor) -> Iterator[Array]:
    """The matrix's rows as f32, some at a time."""
    columns = tensor.shape[-1]
    count = int(np.prod(tensor.shape[:-1]))
    data = tensor.data.reshape(count, -1)
    flat = StoredTensor(tensor.name, tensor.format, (count, columns), data, tensor.scale)
    step = max(CHUNK // max(columns, 1), 1)
    for begin in range(0, count, step):
        piece = flat.part(slice(begin, begin + step))
        yield np.asarray(dequantized_by_package(piece), np.float32)
