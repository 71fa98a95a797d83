"""Attribution: how much of the output error each layer's local error causes.

    M(t)        the float graph with t times the local error d_l added at the result of each layer l;
                M(0) is the float model, M(1) the quantized model
    e           M(1) - M(0), the error of the outputs
    share_l     e . J_l d_l, with the Jacobian J_l averaged over t; the shares add up to |e|²
    second_l    |J_l d_l|², by random projections r of the outputs: the mean of (r . J_l d_l)²
    left out    |e|² - |e - J_l d_l|² = 2 share_l - second_l, what the error loses without l

One backward pass through M(t) with the seed e gives e . J_l for all layers, one with a random seed
gives r . J_l. Dot products with the causes of d_l are nodes of the same compiled graph, so no value
of the model is stored.

The mean of d_l over positions and batches, one number per channel, is a cause of its own (bias
shift): a constant could correct it.

Energies are relative: each output's error is divided by the energy of its signal, and outputs are
averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE, compile_graph
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.stages import simplify
from bitwright.tuning.instrumented import Instrumented, Part, Row
from bitwright.tuning.local_errors import Range
from bitwright.tuning.matching import Matching

BIAS = "bias shift"
FEWEST_POSITIONS = 16
"""Positions of a result from which on its mean error is a cause of its own."""
PROBES = 4
PLACES = 2
"""Places t on the path, Gauss-Legendre quadrature."""


@dataclass
class Line:
    """One cause of one layer's error; energies are relative to the signal of the outputs."""

    layer: str
    op: str
    cause: str
    share: float = 0.0
    """Its part of the error; the shares of all lines add up to the error, up to the rest."""
    second: float = 0.0
    """The energy of the output error that it causes alone."""
    energy: float = 0.0
    """The energy of the local error, in units of the layer's result."""

    @property
    def left_out(self) -> float:
        """What the error would lose without it."""
        return 2 * self.share - self.second


@dataclass
class Attribution:
    """The error of a quantized model's outputs, by layer and cause."""

    error: float
    """The measured error of the outputs."""
    lines: list[Line] = field(default_factory=list)
    layers: dict[str, Line] = field(default_factory=dict)
    """All causes of a layer together."""

    @property
    def rest(self) -> float:
        """What the lines do not explain."""
        return self.error - sum(line.share for line in self.lines)


def prepared(float_graph: Graph) -> Graph:
    """The float graph in the form that quantization starts from."""
    return simplify(float_graph)


def attribute(
    float_graph: Graph,
    quantized: Graph,
    batches: Iterable[Batch],
    *,
    shares: Mapping[str, Array] | None = None,
    observed: Mapping[str, Range] | None = None,
    probes: int = PROBES,
    places: int = PLACES,
    threads: int | None = None,
) -> Attribution:
    """The output error of a quantized graph on batches, split by layer and cause.

    `float_graph` is the model as `prepared` returns it, `quantized` its Q/DQ form with the same
    names. `shares` are the factors of equalized values by name of the product (otherwise they are
    estimated), `observed` the ranges that calibration saw, by name of the layer.
    """
    held = list(batches)
    matching = Matching(float_graph, quantized)
    model = Instrumented(matching, shares or {}, observed or {}, threads=threads)
    reference = Reference(float_graph, held, model.outputs, threads)
    exe = _compiled(quantized, threads)
    errors = [reference.error(number, _run(exe, batch)) for number, batch in enumerate(held)]
    total = sum(float(np.vdot(e, e)) for one in errors for e in one.values())
    sums = _Sums(model.parts)
    if model.exe is None:
        return Attribution(total)
    points, weights = np.polynomial.legendre.leggauss(places)
    for number, (batch, error) in enumerate(zip(held, errors, strict=True)):
        seeds = reference.scaled(error)
        for point, weight in zip(points, weights, strict=True):
            sums.add(model.run(batch, seeds, (point + 1) / 2), weight / 2, bool(point == points[0]))
        del number
    sums.center()
    for batch, seeds in reference.probes(held, probes):
        sums.project(model.run(batch, seeds, 0.5), 1 / probes)
    return sums.attribution(total)


def predict_errors(
    float_graph: Graph,
    options: Mapping[str, Any],
    batches: Iterable[Batch],
    *,
    probes: int = PROBES,
    threads: int | None = None,
) -> dict[str, dict[str, float]]:
    """The relative output error of each layer alone, by option and name of the layer's result.

    `options` are quantized forms of the model: graphs, or what `bw.quantize` returned. A layer that
    an option leaves in float is absent. Names are those of `QuantizationReport.layers[i].value`.
    """
    held, found = list(batches), {}
    for name, option in options.items():
        quantized = getattr(option, "graph", option)
        matching = Matching(float_graph, quantized)
        shares = getattr(option, "equalized", None) or {}
        model = Instrumented(matching, shares, {}, split=False, threads=threads)
        reference = Reference(float_graph, held, model.outputs, threads)
        sums = _Sums(model.parts)
        if model.exe is not None:
            for batch, seeds in reference.probes(held, probes):
                sums.project(model.run(batch, seeds, 0.5), 1 / probes)
        found[name] = {layer: line.second for layer, line in sums.attribution(0.0).layers.items()}
    return found


class Reference:
    """The float model's outputs on batches, and seeds in relative units."""

    def __init__(
        self, graph: Graph, batches: Sequence[Batch], outputs: Sequence[str], threads: int | None
    ) -> None:
        exe = _compiled(graph, threads)
        self.outputs = [{n: y[n] for n in outputs} for y in (_run(exe, b) for b in batches)]
        self.signal = {name: sum(_energy(one[name]) for one in self.outputs) for name in outputs}
        used = [name for name in outputs if self.signal[name] > 0]
        self.units = {
            name: math.sqrt(1 / (len(used) * self.signal[name])) if name in used else 0.0
            for name in outputs
        }
        """The factor of an output's error: its square is a relative energy."""

    def error(self, number: int, found: Mapping[str, Any]) -> dict[str, Array]:
        """The error of one batch's outputs, in relative units."""
        errors = {}
        for name, exact in self.outputs[number].items():
            if np.shape(found[name]) != exact.shape:
                raise BitwrightError(f"output {name!r} has another shape when quantized")
            wide = np.asarray(found[name], np.float64) - exact.astype(np.float64)
            errors[name] = np.where(np.isfinite(wide), wide, 0.0) * self.units[name]
        return errors

    def scaled(self, error: Mapping[str, Array]) -> dict[str, Array]:
        """The seeds of a backward pass for an error or projection in relative units."""
        return {
            name: (one * self.units[name]).astype(self.outputs[0][name].dtype)
            for name, one in error.items()
        }

    def probes(
        self, batches: Sequence[Batch], count: int
    ) -> Iterator[tuple[Batch, dict[str, Array]]]:
        """Each batch with `count` random projections of its outputs."""
        draw = np.random.default_rng(0)
        for batch, outputs in zip(batches, self.outputs, strict=True):
            for _ in range(count):
                signs = {n: draw.choice((-1.0, 1.0), y.shape) for n, y in outputs.items()}
                yield batch, self.scaled(signs)


class _Sums:
    """Sums over runs of the instrumented graph."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        count = len(parts)
        self.first, self.second, self.energy = (np.zeros(count) for _ in range(3))
        self.positions = np.zeros(count)
        self.slopes = [np.zeros(part.channels) for part in parts]
        self.means = [np.zeros(part.channels) for part in parts]
        self.layers = list(dict.fromkeys(part.site.layer for part in parts))
        self.layer_of = np.array([self.layers.index(p.site.layer) for p in parts], np.int64)
        self.bias_second = np.zeros(len(self.layers))
        self.layer_second = np.zeros(len(self.layers))

    def add(self, row: Row, weight: float, is_new: bool) -> None:
        """A row with the error as seed; `is_new` for the first row of a batch."""
        self.first += weight * row.dots
        for total, slope in zip(self.slopes, row.slopes, strict=True):
            total += weight * slope
        if is_new:
            self.energy += row.energies
            self.positions += row.positions
            for total, one in zip(self.means, row.sums, strict=True):
                total += one

    def center(self) -> None:
        """Turn sums of local errors into means; those of too few positions become zero."""
        for number, count in enumerate(self.positions):
            if count >= FEWEST_POSITIONS:
                self.means[number] /= count
            else:
                self.means[number][:] = 0

    def project(self, row: Row, weight: float) -> None:
        """A row with a random seed."""
        constant = self._constant(row.slopes)
        self.second += weight * np.square(row.dots - constant)
        self.bias_second += weight * np.square(self._by_layer(constant))
        self.layer_second += weight * np.square(self._by_layer(row.dots))

    def _constant(self, slopes: list[Array]) -> Array:
        """The part of each dot product that comes from the mean local error."""
        return np.array([s @ m for s, m in zip(slopes, self.means, strict=True)])

    def _by_layer(self, numbers: Array) -> Array:
        return np.bincount(self.layer_of, numbers, len(self.layers))

    def attribution(self, error: float) -> Attribution:
        constant = self._constant(self.slopes)
        bias = self._by_layer(constant)
        found = Attribution(error)
        for number, part in enumerate(self.parts):
            layer, op = part.site.layer, part.site.op
            whole = found.layers.setdefault(layer, Line(layer, op, "all"))
            whole.share += float(self.first[number])
            whole.energy += float(self.energy[number])
            share = float(self.first[number] - constant[number])
            energy = float(self.energy[number])
            line = Line(layer, op, part.cause, share, float(self.second[number]), energy)
            found.lines.append(line)
        for number, layer in enumerate(self.layers):
            whole = found.layers[layer]
            whole.second = float(self.layer_second[number])
            second = float(self.bias_second[number])
            if second or bias[number]:
                found.lines.append(Line(layer, whole.op, BIAS, float(bias[number]), second))
        return found


def _compiled(graph: Graph, threads: int | None) -> Executable:
    return compile_graph(run_passes(graph, INFERENCE), threads=threads)


def _run(exe: Executable, batch: Batch) -> dict[str, Any]:
    exe.reset()
    return exe.run(batch)


def _energy(x: Array) -> float:
    wide = x[np.isfinite(x)].astype(np.float64)
    return float(wide @ wide)
