"""Compares two versions of a model on data: outputs, layers, worst samples, file sizes.

    SQNR     10 log10( sum a^2 / sum (a - b)^2 ) in dB, infinite if both are equal
    cosine   sum a b / ( |a| |b| )

Both models run compiled, batch by batch, and only sums are stored. A layer is a floating-point
value that has the same name in both models after the inference passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.frontend.load import load
from bitwright.ir.dtype import string
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.calibration.observed import observed_values
from bitwright.quant.calibration.progress import progress_bar
from bitwright.quant.data.batches import Batches
from bitwright.quant.data.traced import with_graph

Array = np.ndarray[Any, Any]


@dataclass
class Distance:
    """Sums over pairs of arrays; values that are not finite in both are counted separately."""

    count: int = 0
    signal: float = 0.0
    other_signal: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    largest: float = 0.0
    """The largest magnitude of the first model."""
    nonfinite: int = 0
    """Elements that are not finite in one model, or differ and are not finite in both."""
    rows: int = 0
    same_rows: int = 0
    """Rows of the last axis, and those with the same argmax in both models."""

    def add(self, a: Array, b: Array) -> Distance:
        if a.ndim and a.shape[-1] > 1 and a.size:
            same = a.argmax(-1) == b.argmax(-1)
            self.rows, self.same_rows = self.rows + same.size, self.same_rows + int(same.sum())
        x, y = (array.astype(np.float64).reshape(-1) for array in (a, b))
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            self.nonfinite += int((~(finite | (x == y) | (np.isnan(x) & np.isnan(y)))).sum())
            x, y = x[finite], y[finite]
        if x.size:
            error = x - y
            self.count += x.size
            self.signal += float(x @ x)
            self.other_signal += float(y @ y)
            self.product += float(x @ y)
            self.noise += float(error @ error)
            self.max_error = max(self.max_error, float(np.abs(error).max()))
            self.largest = max(self.largest, float(np.abs(x).max()))
        return self

    @property
    def sqnr_db(self) -> float:
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        norms = math.sqrt(self.signal) * math.sqrt(self.other_signal)
        if not norms:
            return float(self.signal == self.other_signal)
        return min(1.0, max(-1.0, self.product / norms))

    @property
    def same_top1(self) -> float | None:
        """The fraction of rows with the same argmax; None without rows."""
        return self.same_rows / self.rows if self.rows else None

    def as_json(self) -> dict[str, Any]:
        sqnr = self.sqnr_db if math.isfinite(self.sqnr_db) else None
        names = ("cosine", "max_error", "largest", "same_top1", "nonfinite")
        facts = {name: getattr(self, name) for name in names}
        return {"sqnr_db": sqnr, **facts, "values": self.count}


@dataclass
class Comparison:
    """Layers in the order of the first model; a sample is the distance of one batch's outputs."""

    outputs: dict[str, Distance] = field(default_factory=dict)
    layers: dict[str, Distance] = field(default_factory=dict)
    samples: list[Distance] = field(default_factory=list)
    file_bytes: tuple[int, int] | None = None

    def worst(self, count: int) -> list[tuple[int, Distance]]:
        """The batches with the lowest SQNR, worst first."""
        return sorted(enumerate(self.samples), key=lambda pair: pair[1].sqnr_db)[:count]

    def as_json(self, worst: int = 5) -> dict[str, Any]:
        return {
            "batches": len(self.samples),
            "outputs": {name: one.as_json() for name, one in self.outputs.items()},
            "layers": {name: one.as_json() for name, one in self.layers.items()},
            "worst_batches": [
                {"batch": number, **one.as_json()} for number, one in self.worst(worst)
            ],
            "file_bytes": self.file_bytes,
        }


def compare(
    first: Any,
    second: Any,
    data: Any,
    *,
    layers: bool = True,
    subset: int | None = None,
    transform: Any = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compare the second model with the first on the same data; models are graphs or paths."""
    graphs = []
    for model in (first, second):
        found_model, data = with_graph(_graph(model), data, transform)
        graphs.append(run_passes(load(found_model), INFERENCE))
    pairs = _output_pairs(*graphs)
    shared = _shared_layers(*graphs) if layers else []
    keys = {f"output {name}": names for name, names in pairs.items()}
    keys |= {f"layer {name}": (name, name) for name in shared}
    sides = [
        _Side(graph, {key: names[side] for key, names in keys.items()}, threads)
        for side, graph in enumerate(graphs)
    ]
    found = Comparison(
        {name: Distance() for name in pairs},
        {name: Distance() for name in shared},
        file_bytes=_file_bytes(first, second),
    )
    batches = Batches(data, graphs[0], subset=subset, transform=transform)
    with progress_bar("comparing", batches.known_length, progress) as advance:
        for batch in batches:
            sample = Distance()
            for key, a, b in _matched(*(side.run(batch) for side in sides)):
                kind, _, name = key.partition(" ")
                if a.shape != b.shape:
                    raise CalibrationError(
                        f"{kind} {name!r} has another shape in the second model",
                        expected=list(a.shape),
                        found=list(b.shape),
                    )
                (found.outputs if kind == "output" else found.layers)[name].add(a, b)
                if kind == "output":
                    sample.add(a, b)
            found.samples.append(sample)
            advance()
    batches.warn()
    return found


def _graph(model: Any) -> Any:
    """The graph of a quantized model, or the model itself."""
    found = getattr(model, "graph", model)
    return found if isinstance(found, Graph) else model


class _Side:
    """One model and its observed values by key; several keys may name one value."""

    def __init__(self, graph: Graph, keys: Mapping[str, str], threads: int | None) -> None:
        self._keys: dict[str, list[str]] = {}
        for key, name in keys.items():
            self._keys.setdefault(name, []).append(key)
        self._taps = IntermediateOutputs(graph, self._keys, threads=threads, simplify=False)

    def run(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Array]]:
        for part in self._taps.run_parts(batch):
            yield {key: array for name, array in part for key in self._keys[name]}


def _matched(
    first: Iterator[dict[str, Array]], second: Iterator[dict[str, Array]]
) -> Iterator[tuple[str, Array, Array]]:
    """Pairs by key; arrays that only one side has so far are kept until the other has them."""
    a: dict[str, Array] = {}
    b: dict[str, Array] = {}
    empty: dict[str, Array] = {}
    for some, others in itertools.zip_longest(first, second, fillvalue=empty):
        a, b = a | some, b | others
        for key in a.keys() & b.keys():
            yield key, a[key], b[key]
        a, b = (
            {key: side[key].copy() for key in side.keys() - other.keys()}
            for side, other in ((a, b), (b, a))
        )


def _output_pairs(first: Graph, second: Graph) -> dict[str, tuple[str, str]]:
    """The value names of corresponding outputs: by output name, else by position."""
    others = dict(second.outputs)
    if len(first.outputs) != len(others):
        raise CalibrationError(
            "the models have different numbers of outputs",
            expected=len(first.outputs),
            found=len(others),
        )
    if set(others) != {name for name, _ in first.outputs}:
        others = {
            name: value for (name, _), (_, value) in zip(first.outputs, second.outputs, strict=True)
        }
    return {
        name: (value.name, others[name].name)
        for name, value in first.outputs
        if _is_numeric(value.type) and _is_numeric(others[name].type)
    }


def _shared_layers(first: Graph, second: Graph) -> list[str]:
    outputs = {value.name for _, value in first.outputs}
    computed = {name: value for name, value in second.values.items() if not value.node.is_boundary}
    return [
        name
        for name in observed_values(first)[0]
        if name in computed
        and name in first.values
        and name not in outputs
        and not first.values[name].node.is_boundary
        and first.values[name].rank == computed[name].rank
        and computed[name].dtype.is_float
    ]


def _is_numeric(type_: Any) -> bool:
    return isinstance(type_, TensorType) and type_.dtype != string and not type_.dtype.is_complex


def _file_bytes(first: Any, second: Any) -> tuple[int, int] | None:
    if not all(isinstance(model, (str, Path)) for model in (first, second)):
        return None
    return file_bytes(Path(first)), file_bytes(Path(second))


def file_bytes(path: Path) -> int:
    """The size of a model file and its external data files."""
    external = [Path(f"{path}.data"), Path(f"{path}_data"), path.with_suffix(".bin")]
    return sum(file.stat().st_size for file in (path, *external) if file.is_file())
