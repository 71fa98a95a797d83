"""Rows of the layer table: from the report of a quantization, or from a quantized graph alone.

Without a quantization report the scheme and the ranges of a layer are read from the nodes that
quantize its operands; the reason for a scheme is unknown then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.flops import flops
from bitwright.ops.core.interpret import run_node
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.quant.calibration.calibrate import calibrate
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.model.layer_details import (
    BINS,
    Histogram,
    LayerDetail,
    static_range,
    weight_facts,
)
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.report import QuantizationReport

Row = dict[str, Any]
_MOVES = ("transpose", "reshape")
HISTOGRAM_BATCHES = 8


def rows_of_report(report: QuantizationReport) -> list[Row]:
    """One row per layer of a quantization report, with its histograms and ranges."""
    rows = []
    for layer in report.layers:
        detail = report.details.get(layer.value)
        rows.append(asdict(layer) | {"detail": None if detail is None else detail.to_json()})
    return rows


def rows_of_graph(
    graph: Graph, named: Graph | None = None, data: Iterable[Any] | None = None
) -> list[Row]:
    """One row per product of a quantized graph; `named` is the float model, which has the names.

    With data, the values that are quantized get histograms.
    """
    names = LayerNames(graph if named is None else named)
    own = LayerNames(graph)
    at = {s.name: 1 for node in graph.nodes for t in node.types for s in t.symbols}
    rows, inputs = [], {}
    for node in graph.nodes:
        if get(node.op).kind is not Kind.COMPUTE or node.is_boundary:
            continue
        scheme, detail, source = _describe(node)
        name = names.readable(node.name)
        if name == node.name:
            name = own.readable(node.name)
        inputs[node.name] = source
        rows.append(
            {
                "name": name,
                "op": node.op,
                "scheme": scheme,
                "reason": "",
                "sqnr_db": None,
                "multiply_adds": (flops(node, at) or 0) // 2,
                "smoothing": 0.0,
                "clip_ratio": 1.0,
                "value": node.name,
                "weight": None,
                "detail": detail.to_json(),
            }
        )
    if data is not None:
        _add_histograms(graph, rows, inputs, data)
    return rows


def _describe(node: Node) -> tuple[str, LayerDetail, str]:
    """The scheme of a product, its ranges, and the name of the value that is quantized."""
    operands = [value for value in node.inputs[:2] if value is not None]
    if node.attrs.get("int8"):
        return "int8_attention", LayerDetail(), ""
    if node.op.startswith("integer_"):
        return "already_quantized", LayerDetail(), ""
    if len(operands) < 2:
        return "float", LayerDetail(), ""
    activation, weight = (_dequantize(value) for value in operands)
    facts: dict[str, Any] = _weight_detail(weight, operands[1])
    if activation is None:
        return ("float" if weight is None else "weight_only"), LayerDetail(**facts), ""
    (q, scale, zero), quantizer = _three(activation), _source(activation)
    source = next((v.name for v in quantizer.operands), "") if quantizer is not None else ""
    if quantizer is not None and quantizer.op == "dynamic_quantize":
        per_token = bool(quantizer.attrs.get("per_token"))
        return f"dynamic_per_{'token' if per_token else 'tensor'}", LayerDetail(**facts), source
    known, at = constant_value(scale), constant_value(zero)
    if known is not None and known.size == 1 and q is not None:
        shift = 0 if at is None else int(at.reshape(-1)[0])
        info = q.dtype
        low, high = (0, 2**info.bits - 1) if info.name.startswith("u") else _signed(info.bits)
        facts["scale"], facts["zero_point"] = float(known.reshape(-1)[0]), shift
        facts["range"] = static_range(facts["scale"], shift - low, high - low)
    return "static", LayerDetail(**facts), source


def _signed(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _dequantize(value: Value | None) -> Node | None:
    """The dequantize node that a value comes from, through movement of elements."""
    while value is not None and value.node.op in _MOVES:
        value = value.node.inputs[0]
    return None if value is None or value.node.op != "dequantize" else value.node


def _three(node: Node) -> tuple[Value | None, Value | None, Value | None]:
    q, scale, zero, *_ = (*node.inputs, None, None)
    return q, scale, zero


def _source(dequantize: Node) -> Node | None:
    """The node that quantizes what a node dequantizes."""
    value = dequantize.inputs[0]
    while value is not None and value.node.op in _MOVES:
        value = value.node.inputs[0]
    found = None if value is None else value.node
    return found if found is not None and found.op in ("quantize", "dynamic_quantize") else None


def _weight_detail(dequantize: Node | None, value: Value) -> dict[str, Any]:
    """The histogram of a constant weight, quantized or not."""
    if dequantize is None:
        array = constant_value(value)
        is_real = array is not None and np.issubdtype(array.dtype, np.floating)
        return {"weights": Histogram.of(array)} if is_real and array is not None else {}
    arrays = [constant_value(v) for v in dequantize.inputs]
    given = [a for a, v in zip(arrays, dequantize.inputs, strict=True) if v is not None]
    if any(array is None for array in given):
        return {}
    (restored,) = run_node(dequantize, arrays)
    qvalues, scales = given[:2]
    assert qvalues is not None and scales is not None
    facts = dict(weight_facts(qvalues, scales))
    histogram = Histogram.of(restored)
    if histogram is not None:
        facts["weight_range"] = histogram.low, histogram.high
    return facts | {"weights": histogram}


def _add_histograms(
    graph: Graph, rows: list[Row], inputs: Mapping[str, str], data: Iterable[Any]
) -> None:
    """Run data and add histograms of the values that are quantized."""
    wanted = [name for name in dict.fromkeys(inputs.values()) if name in graph.values]
    wanted = [n for n in wanted if not graph.values[n].node.is_boundary]
    if not wanted:
        return
    found = calibrate(
        graph, data, values=wanted, subset=HISTOGRAM_BATCHES, nonfinite="ignore", progress=False
    )
    for row in rows:
        name = inputs[row["value"]]
        if name in found and not found[name].is_empty:
            statistics = found[name]
            row["detail"]["values"] = asdict(coarse(statistics))
            row["detail"]["observed"] = (
                float(statistics.minimum.min()),
                float(statistics.maximum.max()),
            )


def coarse(statistics: Statistics, bins: int = BINS) -> Histogram:
    """The histogram of per-tensor statistics in fewer bins."""
    counts, edges = statistics.counts[0], statistics.edges()[0]
    used = np.flatnonzero(counts)
    first, last = int(used[0]), int(used[-1])
    step = -(-(last + 1 - first) // bins)
    starts = np.arange(first, last + 1, step)
    sums = np.add.reduceat(counts[: last + 1], starts)
    end = min(int(starts[-1]) + step, len(counts))
    return Histogram(float(edges[first]), float(edges[end]), tuple(map(int, sums)))
