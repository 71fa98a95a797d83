"""Attribution: how much of the output error each layer's local error causes.

    M(t)        the float graph with t d_l added at the result of each layer l, d_l its local error;
                M(0) is the float model, M(1) the quantized model
    e           M(1) - M(0), the error of the outputs
    share_l     e . J_l d_l, with the Jacobian J_l averaged over t; the shares add up to |e|²
    u_l         what the outputs lose without l: J_l d_l with the Jacobian at t = 1 where l causes a
                small part ρ = share_l / |e|² of the error, the averaged one where it causes all;
                between them both, with weights 1 - ρ and ρ
    first_l     e . u_l
    second_l    |u_l|² = first_l² / |e|² + |v|² with v the part of u_l across e; random projections
                r of the outputs give |v|² at t = 1: it is the mean of (r . v)²
    cross_l     first_l - second_l, the product with the error that the other layers cause
    left out    |e|² - |e - u_l|² = second_l + 2 cross_l, what the error loses without l

Without l all later layers round other values, and what their rounding contributes to cross_l by
chance is gone. So left out counts w_l cross_l: w_l = τ² / (τ² + σ_l²), with the variance σ_l² of
cross_l / second_l over batches and τ² that of its true value over layers, of which the observed
values are as likely as their scatter allows (Paule and Mandel): Σ (cross_l / second_l)² /
(τ² + σ_l²) is the number of layers.

One backward pass through M(t) with the seed e gives e . J_l for all layers, one with a random seed
gives r . J_l. Dot products with the causes of d_l are nodes of the same compiled graph, so no value
of the model is stored.

The mean of d_l over positions and batches, one number per channel, is a cause of its own (bias
shift) where the error would lose by its removal: a constant can correct it.

Energies are relative: each output's error is divided by the energy of its signal, and outputs are
averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.ops.core.reverse import is_differentiable
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE, compile_graph
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.stages import simplify
from bitwright.tuning.float_layers import SWITCH, restore_layers
from bitwright.tuning.instrumented import Instrumented, Part, Row
from bitwright.tuning.local_errors import Range
from bitwright.tuning.matching import Matching

Outputs = Mapping[str, Any]
BIAS, ALL = "bias shift", "all causes"
FEWEST_POSITIONS = 16
"""Positions of a result from which on its mean error is a cause of its own."""
PROBES = 64
"""Random projections over all batches, and at least two for each batch."""
PLACES = ((1 / 3, 0.75), (1.0, 0.25))
"""Places t on the path and their weights: Radau quadrature, with the quantized model at the end."""
HALFWAY, END = 0.5, 1.0


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
    left_out: float = 0.0
    """What the error would lose without it."""
    energy: float = 0.0
    """The energy of the local error, in units of the layer's result."""

    @property
    def is_present(self) -> bool:
        return bool(self.share or self.second)


@dataclass
class Attribution:
    """The error of a quantized model's outputs, by layer and cause."""

    error: float
    """The measured error of the outputs."""
    lines: list[Line] = field(default_factory=list)
    layers: dict[str, Line] = field(default_factory=dict)
    """All causes of a layer together."""
    means: dict[str, Array] = field(default_factory=dict)
    """The mean local error per channel, by name of the result in the float graph."""

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
    threads: int | None = None,
) -> Attribution:
    """The output error of a quantized graph on batches, split by layer and cause.

    `float_graph` is the model as `prepared` returns it, `quantized` its Q/DQ form with the same
    names. `batches` are iterated several times. `shares` are the factors of equalized values by
    name of the product (otherwise they are estimated), `observed` the ranges that calibration saw,
    by name of the layer.
    """
    matching = Matching(float_graph, quantized)
    reference = Reference(float_graph, batches, threads)
    model = Instrumented(matching, shares or {}, observed or {}, threads=threads)
    return attribute_with(model, reference, quantized, probes=probes)


def attribute_with(
    model: Instrumented,
    reference: Reference,
    quantized: Graph,
    *,
    probes: int = PROBES,
    seen: Callable[[int, Outputs, Outputs], None] | None = None,
) -> Attribution:
    """As `attribute`; `seen` receives each batch's number, float and quantized outputs."""
    exe = compiled(quantized, reference.threads)
    sums = _Sums(model.parts)
    for number, (batch, exact) in enumerate(reference):
        found = run(exe, batch)
        if seen is not None:
            seen(number, exact, found)
        error = reference.error(exact, found)
        energy = sum(float(np.vdot(e, e)) for e in error.values())
        sums.begin(energy)
        seeds = reference.seeds(error, exact)
        for place, weight in PLACES if model.exe is not None else ():
            sums.add(model.run(batch, seeds, place), weight, place == END, energy)
    sums.center()
    _project(model, reference, sums, probes, END, exe)
    return sums.attribution()


def predict_errors(
    float_graph: Graph,
    options: Mapping[str, Any],
    batches: Iterable[Batch],
    *,
    probes: int = PROBES,
    threads: int | None = None,
) -> dict[str, dict[str, float]]:
    """The relative output error of each layer alone, by option and name of the layer's result.

    `float_graph` is the model as `prepared` returns it. `options` are quantized forms of it:
    graphs, or what `bw.quantize` returned. `batches` are iterated several times. A layer that an
    option leaves in float is absent. Names are those of `QuantizationReport.layers[i].value`.
    """
    reference = Reference(float_graph, batches, threads)
    found = {}
    for name, option in options.items():
        matching = Matching(float_graph, getattr(option, "graph", option))
        shares = getattr(option, "equalized", None) or {}
        model = Instrumented(matching, shares, {}, split=False, threads=threads)
        sums = _Sums(model.parts)
        _project(model, reference, sums, probes, HALFWAY)
        found[name] = {layer: line.second for layer, line in sums.attribution().layers.items()}
    return found


def measure_layers(
    matching: Matching,
    reference: Reference,
    shares: Mapping[str, Array],
    quantized: Graph,
    seen: Callable[[int, Outputs, Outputs], None] | None = None,
) -> Attribution:
    """The measured effect of leaving out each layer, for models without gradients.

    It runs the model once per layer and batch. Shares equal the effects, and causes are not told
    apart.
    """
    layers = list(dict.fromkeys(site.layer for site in matching.sites))
    exe = compiled(quantized, reference.threads)
    graph = restore_layers(matching, layers, shares, switches=True)
    switched = compiled(graph, reference.threads)
    total, effects = 0.0, np.zeros(len(layers))
    for number, (batch, exact) in enumerate(reference):
        found = run(exe, batch)
        if seen is not None:
            seen(number, exact, found)
        error = reference.energy_of(exact, found)
        total += error
        for place, layer in enumerate(layers):
            on = {SWITCH + name: np.array(name == layer) for name in layers}
            effects[place] += error - reference.energy_of(exact, run(switched, {**batch, **on}))
    ops = {site.layer: site.op for site in matching.sites}
    made = Attribution(total)
    for layer, effect in zip(layers, effects.tolist(), strict=True):
        made.layers[layer] = Line(layer, ops[layer], ALL, effect, effect, effect)
    made.lines = list(made.layers.values())
    return made


def _project(
    model: Instrumented,
    reference: Reference,
    sums: _Sums,
    probes: int,
    place: float,
    quantized: Executable | None = None,
) -> None:
    """Add random projections of each batch's outputs."""
    draw = np.random.default_rng(0)
    count = max(2, -(-probes // max(1, reference.batches)))
    for batch, exact in reference if model.exe is not None else ():
        error = {}
        if quantized is not None:
            error = reference.error(exact, run(quantized, batch))
        for _ in range(count):
            signs = {n: draw.choice((-1.0, 1.0), exact[n].shape) for n in reference.outputs}
            row = model.run(batch, reference.seeds(signs, exact), place)
            along = sum(float(np.vdot(signs[n], e)) for n, e in error.items())
            sums.project(row, along, 1 / count)


class Reference:
    """The float model on batches: outputs, and errors in relative units.

    Outputs are computed again in each pass over the batches, so that none are stored.
    """

    def __init__(self, graph: Graph, batches: Iterable[Batch], threads: int | None = None) -> None:
        self.threads = threads
        self._exe = compiled(graph, threads)
        self._batches = batches
        self.outputs = [name for name, value in graph.outputs if is_differentiable(value)]
        self.signal = dict.fromkeys(self.outputs, 0.0)
        self.batches = 0
        for _, exact in self:
            self.batches += 1
            for name in self.outputs:
                self.signal[name] += _energy(exact[name])
        used = [name for name in self.outputs if self.signal[name] > 0]
        self.units = {
            name: math.sqrt(1 / (len(used) * self.signal[name])) if name in used else 0.0
            for name in self.outputs
        }
        """The factor of an output's error: its square is a relative energy."""

    def __iter__(self) -> Iterator[tuple[Batch, Outputs]]:
        for batch in self._batches:
            yield batch, run(self._exe, batch)

    def error(self, exact: Outputs, found: Outputs) -> dict[str, Array]:
        """The error of one batch's outputs, in relative units."""
        errors = {}
        for name in self.outputs:
            if np.shape(found[name]) != exact[name].shape:
                raise BitwrightError(f"output {name!r} has another shape when quantized")
            wide = np.asarray(found[name], np.float64) - exact[name].astype(np.float64)
            errors[name] = np.where(np.isfinite(wide), wide, 0.0) * self.units[name]
        return errors

    def energy(self, exe: Executable) -> float:
        """The relative energy of another executable's output error."""
        return sum(self.energy_of(exact, run(exe, batch)) for batch, exact in self)

    def energy_of(self, exact: Outputs, found: Outputs) -> float:
        """The relative energy of the error of one batch's outputs."""
        return sum(float(np.vdot(e, e)) for e in self.error(exact, found).values())

    def seeds(self, error: Mapping[str, Array], exact: Outputs) -> dict[str, Array]:
        """The seeds of a backward pass for an error or projection in relative units."""
        return {n: (one * self.units[n]).astype(exact[n].dtype) for n, one in error.items()}


class _Sums:
    """Sums over runs of the instrumented graph.

    The numbers of `share`, `end` (share at t = 1), `first`, `second` and `part` (ρ) are those of
    parts, of parts without their means, of the bias shifts of layers, and of whole layers.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts, self.error, self.batches = parts, 0.0, 0
        self.dots, self.energy, self.positions = (np.zeros(len(parts)) for _ in range(3))
        self.slopes = [np.zeros(part.channels) for part in parts]
        self.means = [np.zeros(part.channels) for part in parts]
        self.end_dots = np.zeros(len(parts))
        self.end_slopes = [np.zeros(part.channels) for part in parts]
        self.layers = list(dict.fromkeys(part.site.layer for part in parts))
        self.layer_of = np.array([self.layers.index(p.site.layer) for p in parts], np.int64)
        self.share, self.end, self.first, self.second, self.part = (
            np.zeros(2 * (len(parts) + len(self.layers))) for _ in range(5)
        )
        self.squares, self.products = (np.zeros(len(parts) + len(self.layers)) for _ in range(2))
        """Of each batch's dot products of parts and layers: with themselves, with the error."""
        self.error_squares = 0.0

    def begin(self, error: float) -> None:
        """A new batch with this error."""
        self.error += error
        self.error_squares += error**2
        self.batches += 1

    def add(self, row: Row, weight: float, is_end: bool, error: float) -> None:
        """A row with the error as seed; `is_end` for that of the quantized model."""
        self.dots += weight * row.dots
        for total, slope in zip(self.slopes, row.slopes, strict=True):
            total += weight * slope
        if is_end:
            self.end_dots += row.dots
            self.energy += row.energies
            self.positions += row.positions
            for total, one in zip(self.end_slopes, row.slopes, strict=True):
                total += one
            for total, one in zip(self.means, row.sums, strict=True):
                total += one
            dots = np.concatenate([row.dots, self._of_layers(row.dots)])
            self.squares += dots**2
            self.products += dots * error

    def center(self) -> None:
        """Turn sums of local errors into means; those of too few positions become zero."""
        for number, count in enumerate(self.positions):
            if count >= FEWEST_POSITIONS:
                self.means[number] /= count
            else:
                self.means[number][:] = 0
        self.share = self._split(self.dots, self.slopes)
        self.first = self.end = self._split(self.end_dots, self.end_slopes)
        if self.error:
            self.part = np.clip(self.share / self.error, 0, 1)
            self.first = self.end + self.part * (self.share - self.end)
            self.second = np.square(self.first) / self.error

    def project(self, row: Row, along: float, weight: float) -> None:
        """A row with a random seed, whose product with the error is `along`."""
        across = self._split(row.dots, row.slopes)
        if self.error:
            across = (1 - self.part) * (across - self.end / self.error * along)
        self.second += weight * np.square(across)

    def _of_layers(self, numbers: Array) -> Array:
        return np.bincount(self.layer_of, numbers, len(self.layers))

    def _split(self, dots: Array, slopes: list[Array]) -> Array:
        constant = np.array([s @ m for s, m in zip(slopes, self.means, strict=True)])
        by_layer = (self._of_layers(x) for x in (constant, dots))
        return np.concatenate([dots, dots - constant, *by_layer])

    def _left_out(self) -> Array:
        """What the error would lose, with the part of the cross terms that is not chance."""
        cross = self.first - self.second
        count, layers = len(self.parts), len(self.layers)
        whole = np.concatenate([self.end[:count], self.end[len(cross) - layers :]])
        slope = whole / self.error if self.error else whole
        scatter = self.squares - slope * (2 * self.products - slope * self.error_squares)
        scatter = np.maximum(scatter, 0) * self.batches / max(1, self.batches - 1)
        variances = np.concatenate(
            [scatter[:count], scatter[:count], np.zeros(layers), scatter[count:]]
        )
        ends = np.cumsum([count, count, layers])
        groups = (np.split(x, ends) for x in (cross, self.second, variances))
        weights = np.concatenate(
            [reliable_fractions(*group) for group in zip(*groups, strict=True)]
        )
        return np.asarray(self.second + 2 * weights * cross)

    def attribution(self) -> Attribution:
        found = Attribution(self.error)
        ops = {part.site.layer: part.site.op for part in self.parts}
        columns = self.share, self.second, self._left_out()
        facts = list(zip(*(column.tolist() for column in columns), strict=True))
        count, layers = len(self.parts), len(self.layers)
        whole, centered = facts[:count], facts[count : 2 * count]
        biases = facts[2 * count : 2 * count + layers]
        for layer, bias, numbers in zip(self.layers, biases, facts[-layers:], strict=True):
            found.layers[layer] = Line(layer, ops[layer], ALL, *numbers)
            line = Line(layer, ops[layer], BIAS, *bias)
            if line.left_out > 0:
                found.lines.append(line)
        shifted = {line.layer for line in found.lines}
        for number, part in enumerate(self.parts):
            layer, name = part.site.layer, part.site.value.name
            share, second, left_out = (centered if layer in shifted else whole)[number]
            energy = float(self.energy[number])
            line = Line(layer, ops[layer], part.cause, share, second, left_out, energy)
            found.lines.append(line)
            if layer in shifted:
                found.means[name] = found.means.get(name, 0.0) + self.means[number]
        return found


def reliable_fractions(cross: Array, second: Array, variances: Array) -> Array:
    """The fraction of each cross term that is not chance; `variances` are those of the terms."""
    used = second > 0
    ratios = cross[used] / second[used]
    noise = variances[used] / second[used] ** 2
    found = np.ones_like(cross)
    if np.any(noise > 0):
        spread = _spread(ratios, noise)
        found[used] = spread / np.maximum(spread + noise, 1e-300)
    return found


def _spread(ratios: Array, noise: Array) -> float:
    """τ² with Σ ratio² / (τ² + noise) = count; 0 if noise alone explains the ratios."""
    low, high = 0.0, float(ratios @ ratios)
    for _ in range(60):
        middle = (low + high) / 2
        is_less = np.sum(ratios**2 / np.maximum(middle + noise, 1e-300)) > len(ratios)
        low, high = (middle, high) if is_less else (low, middle)
    return (low + high) / 2


def compiled(graph: Graph, threads: int | None) -> Executable:
    return compile_graph(run_passes(graph, INFERENCE), threads=threads)


def run(exe: Executable, batch: Batch) -> dict[str, Any]:
    exe.reset()
    return exe.run(batch)


def _energy(x: Array) -> float:
    wide = x[np.isfinite(x)].astype(np.float64)
    return float(wide @ wide)
