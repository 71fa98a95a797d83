"""The graph that attributes an output error to local errors (`tuning.attribution`).

It contains the quantized graph, the local errors d of its layers by cause, the float graph with
t d added at each layer, its backward pass from given seeds, and dot products of the gradients with
the local errors. It is compiled once; a run with one seed gives one row of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bitwright.autodiff.grad import PREFIX, grad
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.reverse import is_differentiable
from bitwright.pipeline import compile_step
from bitwright.quant.data.batches import Batch
from bitwright.tuning.local_errors import LocalErrors, Range
from bitwright.tuning.matching import LayerPair, Matching

TIME, LOSS, SEED = "attribution.time", "attribution.loss", "attribution.seed."


@dataclass(frozen=True)
class Part:
    """The local error of one site by one cause."""

    site: LayerPair
    cause: str
    channels: int
    """The length of its sums per channel; 0 if the number of channels is not fixed."""


@dataclass(frozen=True)
class Row:
    """What one run gives: numbers per part, and sums per channel."""

    dots: Array
    """g . d"""
    energies: Array
    """|d|²"""
    slopes: list[Array]
    """Σ g over positions, by part; one number per channel."""
    sums: list[Array]
    """Σ d over positions, by part."""
    positions: Array
    """By part."""


class Instrumented:
    """The compiled graph; `run` gives the numbers of one batch, seed and place t."""

    def __init__(
        self,
        matching: Matching,
        shares: Mapping[str, Array],
        observed: Mapping[str, Range],
        *,
        split: bool = True,
        threads: int | None = None,
    ) -> None:
        self.matching = matching
        self.parts: list[Part] = []
        self._outputs = {n: v for n, v in matching.float_graph.outputs if is_differentiable(v)}
        graph = self._forward(shares, observed, split)
        self.exe: Executable | None = None
        if self.parts:
            self.exe = compile_step(self._with_products(graph), threads=threads)

    @property
    def outputs(self) -> list[str]:
        """The outputs whose error is attributed."""
        return list(self._outputs)

    def run(self, batch: Batch, seeds: Mapping[str, Array], t: float) -> Row:
        assert self.exe is not None
        given = {SEED + name: seeds[name] for name in self._outputs}
        found = self.exe.run({**batch, **given, TIME: np.float32(t)})
        self.exe.reset()
        ends = np.cumsum([part.channels for part in self.parts])[:-1]
        return Row(
            found["dots"].astype(np.float64),
            found["energies"].astype(np.float64),
            np.split(found["slopes"].astype(np.float64), ends),
            np.split(found["sums"].astype(np.float64), ends),
            found["positions"],
        )

    def _forward(
        self, shares: Mapping[str, Array], observed: Mapping[str, Range], split: bool
    ) -> Graph:
        """The quantized graph, the local errors, and the float graph with them."""
        quantized, source = self.matching.quantized, self.matching.float_graph
        b = Builder.of(quantized.with_(updates=()))
        b.outputs = {}
        t = b.input(TIME, "f32[]")
        here = {value: value for node in quantized.nodes for value in node.outputs}
        errors = LocalErrors(b, self.matching, here, shares, observed)
        used = reaching(source)
        found: dict[Value, tuple[LayerPair, dict[str, Value]]] = {}
        for site in self.matching.sites:
            if site.value in used:
                found[site.value] = site, errors.causes(site, split)
        new: dict[Value, Value] = {}
        self._inner: list[str] = []
        for node in source.nodes:
            new.update(zip(node.outputs, copied(b, node, new, quantized).outputs, strict=True))
            for value in node.outputs:
                if value in found:
                    new[value] = self._inject(b, new[value], *found[value], t)
        terms = []
        for name, value in self._outputs.items():
            seed = b.input(SEED + name, new[value].type)
            weighted = b.cast(b.mul(new[value], seed), to=f32)
            terms.append(_sum(b, weighted, range(weighted.rank)))
        loss = terms[0] if terms else b.constant(np.float32(0))
        for term in terms[1:]:
            loss = b.add(loss, term)
        b.output(LOSS, loss)
        return b.build()

    def _inject(
        self, b: Builder, exact: Value, site: LayerPair, causes: dict[str, Value], t: Value
    ) -> Value:
        total = None
        for cause, error in causes.items():
            total = error if total is None else b.add(total, error)
            b.output(f"error {len(self.parts)}", error)
            size = site.value.shape[site.channel_axis] if site.value.rank else 0
            self.parts.append(Part(site, cause, size if isinstance(size, int) else 0))
        scaled = b.mul(t, total)
        if exact.dtype != f32:
            scaled = b.cast(scaled, to=exact.dtype)
        moved: Value = b.add(exact, scaled)
        self._inner += [moved.name] * len(causes)
        return moved

    def _with_products(self, graph: Graph) -> Graph:
        """The graph with gradients, whose outputs are dot products and sums."""
        graph = grad(graph, LOSS, dict.fromkeys(self._inner))
        held = dict(graph.outputs)
        b = Builder.of(graph)
        b.outputs = {}
        columns: tuple[list[Value], ...] = ([], [], [], [], [])
        dots, energies, slopes, sums, counts = columns
        for number, (part, inner) in enumerate(zip(self.parts, self._inner, strict=True)):
            error, slope = held[f"error {number}"], held[PREFIX + inner]
            if slope.dtype != f32:
                slope = b.cast(slope, to=f32)
            dots.append(_total(b, b.mul(slope, error)))
            energies.append(_total(b, b.mul(error, error)))
            if part.channels:
                axis = part.site.channel_axis % error.rank
                axes = [i for i in range(error.rank) if i != axis]
                for one, into in ((slope, slopes), (error, sums)):
                    into.append(_sum(b, one, axes))
            count = b.sizes(values=(error.tensor.count,), shape=(1,))
            counts.append(b.div(count, part.channels) if part.channels else count)
        empty = b.constant(np.zeros(0, np.float32))
        b.output("dots", b.concat(*dots, axis=0))
        b.output("energies", b.concat(*energies, axis=0))
        b.output("slopes", b.concat(*slopes, axis=0) if slopes else empty)
        b.output("sums", b.concat(*sums, axis=0) if sums else empty)
        b.output("positions", b.concat(*counts, axis=0))
        return verify(prune(b.build()))


def copied(b: Builder, node: Node, new: Mapping[Value, Value], quantized: Graph) -> Node:
    """A node of the float graph in the builder; inputs and states are those of `quantized`."""
    if node.op in ("input", "state") and node.name in quantized.values:
        return quantized.values[node.name].node
    inputs = tuple(None if v is None else new[v] for v in node.inputs)
    names = node.names if node.op == "input" else [b.fresh_name(f"path/{n}") for n in node.names]
    return b.append(node.with_(inputs=inputs, names=tuple(names)))


def reaching(graph: Graph) -> set[Value]:
    """The values on which a float output depends differentiably."""
    found = {value for _, value in graph.outputs if is_differentiable(value)}
    for node in reversed(graph.nodes):
        if any(value in found for value in node.outputs):
            found.update(filter(is_differentiable, node.operands))
    return found


def _sum(b: Builder, x: Value, axes: Iterable[int]) -> Value:
    found = list(axes)
    return b.reduce_sum(x, axes=found, keepdims=False) if found else x


def _total(b: Builder, x: Value) -> Value:
    return b.reshape(_sum(b, x, range(x.rank)), shape=(1,))  # type: ignore[no-any-return]
