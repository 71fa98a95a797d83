"""bw.convert: converts a model to another float precision and measures the error on data.

    c = bw.convert("model.onnx", "f16", data=batches)
    print(c.report)
    c.save("model-f16.onnx")

A run in full precision records the range of every value. Ops whose values would overflow or
underflow in half precision stay in f32; the report lists them with the reason. The converted model
then runs on the same data to measure its output error.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwright.frontend.load import load
from bitwright.ir.dtype import bf16, f32
from bitwright.ir.graph import Graph
from bitwright.ir.paths import value_paths
from bitwright.ops.core.check import verify
from bitwright.passes.manager import run_passes
from bitwright.passes.precision.apply import RULE, apply_precision, in_full_precision
from bitwright.passes.precision.plan import Extent, is_changeable
from bitwright.passes.precision.policy import Policy, policy, require_layers
from bitwright.passes.precision.settle_casts import settle_casts
from bitwright.pipeline import PRECISION, SIMPLIFY, compile_graph
from bitwright.quant.calibration.calibrate import Calibrator
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.data.batches import Batches, Transform
from bitwright.quant.data.traced import with_graph
from bitwright.quant.model.sensitivity import Losses
from bitwright.rewrite.trace import Trace

CHECKED_BATCHES = 8
"""The most batches that the outputs are compared on."""


@dataclass(repr=False)
class PrecisionReport:
    """What a conversion changed, what stayed in f32 and why, and the output error."""

    policy: str
    changed: dict[str, str] = field(default_factory=dict)
    """The new precision by node."""
    kept: dict[str, str] = field(default_factory=dict)
    """The reason by node that stayed in full precision."""
    float_bytes: int = 0
    converted_bytes: int = 0
    """Bytes of all parameters and constants."""
    output_sqnr_db: dict[str, float] = field(default_factory=dict)
    """Against the original model, on data; empty without data."""

    def __repr__(self) -> str:
        return f"<report: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        lines = [
            f"{self.policy}: {len(self.changed)} ops changed, {len(self.kept)} kept; weights "
            f"{self.float_bytes / 1e6:.2f} MB -> {self.converted_bytes / 1e6:.2f} MB"
        ]
        lines += [f"output {name}: {db:.1f} dB" for name, db in self.output_sqnr_db.items()]
        lines += [f"kept {name}: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Converted:
    """A converted model and its report."""

    graph: Graph
    report: PrecisionReport
    policy: Policy

    def save(self, path: str | Path, *, bf16_ops: bool = False, **options: Any) -> None:
        """Write the model (.onnx, .bw or .txt).

        Few runtimes have bf16 ops. An .onnx file of a bf16 model stores bf16 weights and casts them
        to f32, which any runtime reads; metadata in the file makes bitwright compute in bf16.
        `bf16_ops=True` writes bf16 ops.
        """
        graph = self.graph
        if Path(path).suffix == ".onnx" and not bf16_ops and _computes_in_bf16(graph):
            kept = {glob.escape(name): f32 for name in self.report.kept}
            again = replace(self.policy, layers={**self.policy.layers, **kept})
            graph = verify(in_full_precision(graph))
            graph = graph.with_(meta={**graph.meta, PRECISION: again.to_json()})
        graph.save(path, **options)

    def __repr__(self) -> str:
        first, *_ = str(self.report).splitlines()
        return f"<converted {self.graph.name!r}: {first}>"


def convert(
    model: Any,
    precision: str | Policy | Mapping[str, Any],
    data: Any = None,
    *,
    statistics: Mapping[str, Statistics] | None = None,
    io: bool = False,
    transform: Transform | None = None,
    subset: int | None = None,
    threads: int | None = None,
) -> Converted:
    """Convert a model (graph, path, bytes or ModelProto) to a precision.

    `data` is what `bw.calibrate` accepts, `statistics` what it returns; either gives the ranges
    that decide what stays in f32. `io=True` also changes the types of inputs and outputs.
    """
    chosen = policy(precision)
    model, data = with_graph(model, data, transform)
    loaded = load(model)
    before = run_passes(loaded, SIMPLIFY)
    require_layers(chosen, [loaded, before])
    batches = None if data is None else Batches(data, before, transform=transform, subset=subset)
    if batches is not None and statistics is None:
        statistics = _observe(before, batches, threads)
    trace = Trace()
    graph = apply_precision(before, chosen, extents_of(statistics or {}), trace)
    graph = verify(settle_casts(graph, io))
    report = PrecisionReport(str(chosen))
    for event in trace.events:
        if event.rule == RULE:
            (report.changed if event.fired else report.kept)[event.node] = event.reason
    report.float_bytes, report.converted_bytes = _weight_bytes(before), _weight_bytes(graph)
    if batches is not None and batches.is_repeatable:
        report.output_sqnr_db = _losses(before, graph, batches, threads)
    if batches is not None:
        batches.warn()
    return Converted(graph, report, chosen)


def extents_of(statistics: Mapping[str, Statistics]) -> dict[str, Extent]:
    """The largest magnitude of each observed value, by path."""
    return {
        name: Extent(float(found.max_abs.max(initial=0.0)))
        for name, found in statistics.items()
        if not found.is_empty
    }


def _observe(graph: Graph, batches: Batches, threads: int | None) -> Mapping[str, Statistics]:
    """Statistics of every float value that the graph computes."""
    names = [
        path
        for path, value in value_paths(graph).items()
        if is_changeable(value) and value.node.op not in ("constant", "parameter", "state")
    ]
    calibrator = Calibrator(graph, names, nonfinite="ignore", threads=threads, keep_values=False)
    for batch in batches:
        calibrator.step(batch)
    return calibrator.ranges


def _losses(before: Graph, after: Graph, batches: Batches, threads: int | None) -> dict[str, float]:
    """The output SQNR in dB on the first batches."""
    exact, converted = compile_graph(before, threads=threads), compile_graph(after, threads=threads)
    found = Losses()
    types = {value.name: value.dtype.numpy for value in after.inputs if is_changeable(value)}
    for number, batch in enumerate(batches):
        if number == CHECKED_BATCHES:
            break
        feeds = {name: array.astype(types.get(name, array.dtype)) for name, array in batch.items()}
        expected = exact.run(batch)
        given = converted.run(feeds)
        found.add(expected, {n: a.astype(expected[n].dtype) for n, a in given.items()})
    return found.decibels


def _weight_bytes(graph: Graph) -> int:
    nodes = (node for _, node in graph.walk() if node.op in ("parameter", "constant"))
    held = ((node, node.attrs.get("value")) for node in nodes)
    return sum(n.outputs[0].dtype.nbytes(a.size) for n, a in held if a is not None)


def _computes_in_bf16(graph: Graph) -> bool:
    return any(
        is_changeable(value) and value.dtype == bf16
        for _, node in graph.walk()
        if not node.is_boundary
        for value in node.outputs
    )
