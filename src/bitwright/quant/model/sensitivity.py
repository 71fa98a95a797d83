"""What coding a value costs the model's outputs, measured with the rest of the model in float.

The float model gets a switch in front of every product in question,

    x  ->  where(switch, dequantize(quantize(x / f)) * f, x)

and one behind every attention in question, between its result in codes and that in f32. It is
compiled once: with all switches off it is the float model, with one on it shows the effect of that
site alone. A small error where the model is sensitive can cost more than a large one where it is
not, which no measurement at the product itself can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.manager import History, run_passes
from bitwright.pipeline import INFERENCE, compile_simple
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.quantized_inputs import static_qvalues
from bitwright.quant.model.weights.choose import ActivationQuant
from bitwright.quant.model.weights.nearest import decibels

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Any]
NUMBERS_COMPARED = 1 << 20
BYTES_HELD_OUT = 1 << 26
"""Outputs of held-out batches that are kept, of at least one batch."""
LOST = 1e3
"""The error, relative to its place, of a number that is finite in the float model alone."""


def compiled(graph: Graph, threads: int | None) -> Executable:
    return compile_simple(graph, History(), threads)


class Losses:
    """Squared errors of each real output, added up over batches, relative to its square."""

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
        """By output; one that was empty or zero on all batches has nothing to lose."""
        return {n: self._noise[n] / s for n, s in self._signal.items() if s > 0}

    @property
    def decibels(self) -> dict[str, float]:
        return {name: decibels(loss) for name, loss in self.relative.items()}

    @property
    def worst(self) -> float:
        return max(self.relative.values(), default=0.0)


def _power_and_loss(exact: Array, found: Array) -> tuple[float, float]:
    """The sums of squares of an output and of its error, a part at a time to save memory."""
    power = loss = 0.0
    flat, other = exact.reshape(-1), found.reshape(-1)
    for start in range(0, flat.size, NUMBERS_COMPARED):
        part = slice(start, start + NUMBERS_COMPARED)
        told = np.isfinite(flat[part])  # masked places say nothing
        wide = flat[part][told].astype(np.float64)
        near = other[part][told]
        error = np.where(np.isfinite(near), near - wide, LOST * np.abs(wide))
        power += float(wide @ wide)
        loss += float(error @ error)
    return power, loss


class SensitivityAnalysis:
    """The float model with switches, on the batches that a quantized model is checked on; and what
    it gives on batches that nothing was learned from (`held_out`)."""

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
        self._exe = compiled(_with_switches(graph, activations, self._names), threads)
        self.expected = [self._run(batch, ()) for batch in batches]
        self._held_out: list[tuple[Batch, dict[str, Any]]] = []
        room = BYTES_HELD_OUT
        for batch in held_out:
            expected = self._run(batch, ())
            room -= sum(array.nbytes for array in expected.values() if hasattr(array, "nbytes"))
            if room < 0 and self._held_out:
                break
            self._held_out.append((batch, expected))
        if not self._names:
            self.forget_switches()

    def forget_switches(self) -> None:
        """Give the memory of the model with switches back: only `of` is asked from now on."""
        self._exe = None

    def of(self, graph: Graph) -> Losses:
        """What a quantized graph loses."""
        self._last = compiled(run_passes(graph, INFERENCE), self._threads)
        losses = Losses()
        for batch, expected in zip(self._batches, self.expected, strict=True):
            losses.add(expected, self._last.run(batch))
        return losses

    def on_held_out(self) -> tuple[Losses, int] | None:
        """What the graph that `of` was asked about last loses on batches that were held out, and
        how many those are; None where there are none."""
        if not self._held_out:
            return None
        losses = Losses()
        for batch, expected in self._held_out:
            losses.add(expected, self._last.run(batch))
        return losses, len(self._held_out)

    def together(
        self, *points: QuantizationPoint | Node, little: float = 0.0, reached: bool = False
    ) -> float:
        """Relative squared error of the worst output with these sites and attentions in codes.

        Where the first batch loses no more than `little`, the others are not asked. With `reached`
        only the batches count that lose anything: those that come by a branch.
        """
        losses = Losses()
        for batch, expected in zip(self._batches, self.expected, strict=True):
            found = self._run(batch, points)
            if reached:
                one = Losses()
                one.add(expected, found)
                if not one.worst:
                    continue
            losses.add(expected, found)
            if not reached and losses.worst <= little:
                break
        return losses.worst

    def _run(self, batch: Batch, on: Collection[QuantizationPoint | Node]) -> dict[str, Any]:
        switches = {name: np.array(point in on) for point, name in self._names.items()}
        assert self._exe is not None
        return self._exe.run({**batch, **switches})


def _with_switches(
    graph: Graph,
    activations: Mapping[QuantizationPoint, ActivationQuant],
    names: Mapping[QuantizationPoint | Node, str],
) -> Graph:
    return verify(_Switched(graph, activations, names).run())


class _Switched:
    """One graph with switches: the model, whose inputs they are, or a branch, which they reach as
    operands of its `if`."""

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
        self.b = Builder(graph.name)
        for node in graph.nodes:
            for name in node.names:
                self.b.fresh_name(name)
        self.b.reserve_symbols(s.name for s in graph.input_symbols)

    def run(self) -> Graph:
        b, graph = self.b, self.graph
        new: dict[Value, Value] = {}
        seen: dict[tuple[QuantizationPoint, Value], Value] = {}
        inputs = [node for node in graph.nodes if node.op == "input"]
        for node in inputs:  # the switches come behind them
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
                held = _round_trip(b, x, self.activations[point], product.channel_axis)
                seen[point, x] = b.where(switches[point], held, x)
            inputs[0] = seen[point, x]
        elif node.op == "if" and self._holds_points(node):
            inner = {p: f"{name}.inside" for p, name in self.names.items() if _is_inside(p)}
            bodies = {
                name: _Switched(body, self.activations, inner).run()
                for name, body in node.bodies.items()
            }
            attrs = {**attrs, **bodies}
            inputs += [switches[part] for part in inner]
        changed = tuple(inputs)
        same = changed == node.inputs and attrs is node.attrs
        kept = b.append(node if same else node.with_(inputs=changed, attrs=attrs))
        new.update(zip(node.outputs, kept.outputs, strict=True))
        if node in self.names:
            (y,) = kept.outputs
            match_dequantize = b.attention(*kept.inputs, **{**kept.attrs, "int8": True})
            new[node.outputs[0]] = b.where(switches[node], match_dequantize, y)

    def _holds_points(self, node: Node) -> bool:
        return any(
            inner in self.points for body in node.bodies.values() for _, inner in body.walk()
        )


def _is_inside(part: QuantizationPoint | Node) -> bool:
    return isinstance(part, QuantizationPoint) and part.is_inside


def _round_trip(b: Builder, x: Value, activation: ActivationQuant, axis: int) -> Value:
    held = static_qvalues(b, x, activation, axis)
    if activation.factors is not None:
        shape = [-1 if i == axis else 1 for i in range(x.rank)]
        held = b.mul(held, activation.factors.reshape(shape))
    return held
