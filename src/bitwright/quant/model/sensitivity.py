"""Sensitivity analysis: the output error of quantizing one value, with the rest in float.

The float model gets a switch before each analyzed product,

    x  ->  where(switch, dequantize(quantize(x / f)) * f, x)

and one after each analyzed attention op, which selects its int8 or f32 result. The model is
compiled once. With all switches off it is the float model; with one on it shows the effect of that
point alone. A small error at a sensitive point can cost more than a large error elsewhere, which
the error at the product does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.manager import History, run_passes
from bitwright.pipeline import INFERENCE, compile_simple
from bitwright.quant.calibration.time_limit import check_time
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.quantized_inputs import builder_for, static_qvalues
from bitwright.quant.model.weights.choose import ActivationQuant
from bitwright.quant.model.weights.nearest import decibels

Outputs = Mapping[str, Any]
CHUNK = 1 << 20
"""Values compared at a time."""
MAX_HELD_OUT_BYTES = 1 << 26
"""Outputs kept for held-out batches; at least those of one batch."""
NONFINITE_ERROR = 1e3
"""The relative error of a value that is finite only in the float model."""


def compiled(graph: Graph, threads: int | None) -> Executable:
    return compile_simple(graph, History(), threads)


class Losses:
    """Squared error and signal of each float output, summed over batches."""

    def __init__(self) -> None:
        self._signal: dict[str, float] = {}
        self._noise: dict[str, float] = {}

    def add(self, expected: Outputs, found: Outputs) -> None:
        for name, exact in expected.items():
            if not isinstance(exact, np.ndarray) or exact.dtype.kind != "f":
                continue
            held = found[name]
            if held.shape != exact.shape:
                raise BitwrightError(f"output {name!r} has another shape when quantized")
            power, lost = _power_and_loss(exact, held)
            self._signal[name] = self._signal.get(name, 0.0) + power
            self._noise[name] = self._noise.get(name, 0.0) + lost

    @property
    def relative(self) -> dict[str, float]:
        """Relative squared error by output; outputs that are empty or zero are left out."""
        return {n: self._noise[n] / s for n, s in self._signal.items() if s > 0}

    @property
    def decibels(self) -> dict[str, float]:
        return {name: decibels(loss) for name, loss in self.relative.items()}

    @property
    def worst(self) -> float:
        return max(self.relative.values(), default=0.0)


def _power_and_loss(exact: Array, found: Array) -> tuple[float, float]:
    """The sums of squares of an output and of its error, in chunks to bound memory."""
    power = loss = 0.0
    flat, other = exact.reshape(-1), found.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = slice(start, start + CHUNK)
        finite = np.isfinite(flat[part])  # masked positions do not count
        wide = flat[part][finite].astype(np.float64)
        near = other[part][finite]
        error = np.where(np.isfinite(near), near - wide, NONFINITE_ERROR * np.abs(wide))
        power += float(wide @ wide)
        loss += float(error @ error)
    return power, loss


class SensitivityAnalysis:
    """The float model with switches, run on the batches that choices are checked on, and its
    outputs on held-out batches."""

    def __init__(
        self,
        graph: Graph,
        activations: Mapping[QuantizationPoint, ActivationQuant],
        batches: list[Batch],
        threads: int | None,
        attentions: Sequence[Node] = (),
        held_out: Sequence[Batch] = (),
    ) -> None:
        self._batches, self._threads = batches, threads
        parts: list[QuantizationPoint | Node] = [*activations, *attentions]
        self._names = {part: f"{part.name}.switch" for part in parts}
        self._exe: Executable | None
        self._exe = compiled(verify(_Switched(graph, activations, self._names).run()), threads)
        self.expected = [self._run(batch, ()) for batch in batches]
        self._held_out: list[tuple[Batch, dict[str, Any]]] = []
        room = MAX_HELD_OUT_BYTES
        for batch in held_out:
            expected = self._run(batch, ())
            room -= sum(array.nbytes for array in expected.values() if hasattr(array, "nbytes"))
            if room < 0 and self._held_out:
                break
            self._held_out.append((batch, expected))
        if not self._names:
            self.forget_switches()

    def forget_switches(self) -> None:
        """Free the model with switches; `output_error` is not available afterwards."""
        self._exe = None

    def measure(self, graph: Graph) -> Losses:
        self._last = compiled(run_passes(graph, INFERENCE), self._threads)
        losses = Losses()
        for batch, expected in zip(self._batches, self.expected, strict=True):
            losses.add(expected, self._last.run(batch))
        return losses

    def on_held_out(self) -> tuple[Losses, int] | None:
        """The losses of the last graph measured on the held-out batches, and their number; None
        without held-out batches."""
        if not self._held_out:
            return None
        losses = Losses()
        for batch, expected in self._held_out:
            losses.add(expected, self._last.run(batch))
        return losses, len(self._held_out)

    def output_error(
        self, *points: QuantizationPoint | Node, negligible: float = 0.0, only_reached: bool = False
    ) -> float:
        """Relative squared error of the worst output with these points and attention ops in int8.

        Batches after the first run only if its error exceeds `negligible`. With `only_reached`,
        only batches with an error count: those that reach the branch.
        """
        losses = Losses()
        for batch, expected in zip(self._batches, self.expected, strict=True):
            found = self._run(batch, points)
            if only_reached:
                one = Losses()
                one.add(expected, found)
                if not one.worst:
                    continue
            losses.add(expected, found)
            if not only_reached and losses.worst <= negligible:
                break
        return losses.worst

    def _run(self, batch: Batch, on: Collection[QuantizationPoint | Node]) -> dict[str, Any]:
        check_time()
        switches = {name: np.array(point in on) for point, name in self._names.items()}
        assert self._exe is not None
        return self._exe.run({**batch, **switches})


class _Switched:
    """Adds switches to one graph, as its inputs; those of a branch are operands of its `if`."""

    def __init__(
        self,
        graph: Graph,
        activations: Mapping[QuantizationPoint, ActivationQuant],
        names: Mapping[QuantizationPoint | Node, str],
    ) -> None:
        self.graph, self.activations, self.names = graph, activations, names
        self.points: dict[Node, tuple[QuantizationPoint, Product]] = {}
        for point in activations:
            self.points.update({product.node: (point, product) for product in point.products})
        self.b = builder_for(graph)

    def run(self) -> Graph:
        b, graph = self.b, self.graph
        new: dict[Value, Value] = {}
        seen: dict[tuple[QuantizationPoint, Value], Value] = {}
        inputs = [node for node in graph.nodes if node.op == "input"]
        for node in inputs:  # the switches follow them
            new.update(zip(node.outputs, b.append(node).outputs, strict=True))
        self.switches: dict[QuantizationPoint | Node, Value] = {
            part: b.input(name, "bool[]") for part, name in self.names.items()
        }
        for node in graph.nodes:
            if node.op != "input":
                self._append(node, new, seen)
        return graph.with_(
            nodes=tuple(b.nodes),
            outputs=tuple((name, new[v]) for name, v in graph.outputs),
            updates=tuple((new[s], new[v]) for s, v in graph.updates),
        )

    def _append(
        self,
        node: Node,
        new: dict[Value, Value],
        seen: dict[tuple[QuantizationPoint, Value], Value],
    ) -> None:
        b, switches = self.b, self.switches
        inputs = [None if v is None else new[v] for v in node.inputs]
        attrs = node.attrs
        if node in self.points:
            point, product = self.points[node]
            x = inputs[0]
            assert x is not None
            if (point, x) not in seen:
                rounded = _round_trip(b, x, self.activations[point], product.channel_axis)
                seen[point, x] = b.where(switches[point], rounded, x)
            inputs[0] = seen[point, x]
        elif node.op == "if" and self._holds_points(node):
            inner: dict[QuantizationPoint | Node, str] = {
                p: f"{self.names[p]}.inside" for p in self.activations if p.is_inside
            }
            switched = {n: _Switched(g, self.activations, inner) for n, g in node.bodies.items()}
            attrs = {**attrs, **{name: body.run() for name, body in switched.items()}}
            inputs += [switches[part] for part in inner]
        changed = tuple(inputs)
        same = changed == node.inputs and attrs is node.attrs
        kept = b.append(node if same else node.with_(inputs=changed, attrs=attrs))
        new.update(zip(node.outputs, kept.outputs, strict=True))
        if node in self.names:
            (y,) = kept.outputs
            int8 = b.attention(*kept.inputs, **{**kept.attrs, "int8": True})
            new[node.outputs[0]] = b.where(switches[node], int8, y)

    def _holds_points(self, node: Node) -> bool:
        bodies = node.bodies.values()
        return any(inner in self.points for body in bodies for _, inner in body.walk())


def _round_trip(b: Builder, x: Value, activation: ActivationQuant, axis: int) -> Value:
    """x after quantize and dequantize, without smoothing factors."""
    rounded = static_qvalues(b, x, activation, axis)
    if activation.factors is not None:
        shape = [-1 if i == axis else 1 for i in range(x.rank)]
        rounded = b.mul(rounded, activation.factors.reshape(shape))
    return rounded
