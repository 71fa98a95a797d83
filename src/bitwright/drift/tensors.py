"""The quantized tensors of a model that a monitor watches, with what calibration saw of each.

    static     quantize with constant parameters: values outside of the range are clipped
    dynamic    dynamic_quantize: nothing is clipped; values are compared with the calibrated range

Edges divide the values of a tensor into bins. The outer edges are exact: a value is in the first or
last bin if and only if the quantizer saturates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, f32, f64
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.ops.quant.quantize import quotient
from bitwright.quant.model.calibrated_ranges import (
    OCTAVES,
    CalibratedRange,
    read_calibrated_ranges,
)
from bitwright.quant.model.layer_names import LayerNames

BRANCHES = ("then", "else")
Calibrated = Mapping[str, CalibratedRange]
"""What calibration saw, by path of a layer."""
QUANTIZERS = ("quantize", "dynamic_quantize")
EQUALIZED = ".equalized"
"""The suffix of values that cross-layer equalization scaled."""
_STEPS = 6
"""Nodes between a quantizer and the product that reads it, at most."""


@dataclass(frozen=True, eq=False)
class WatchedTensor:
    """One quantized tensor."""

    name: str
    """In words: "encoder.layer.3.mlp input"."""
    value: Value
    """The float input of the quantizer."""
    is_static: bool
    low: float
    high: float
    """The quantized range; for a dynamic range that of the calibration data."""
    edges: Array
    """2 OCTAVES + 2 ascending edges, in the type that counts compare in."""
    calibrated: CalibratedRange | None
    """None if the model's file has no figures for it."""
    scale: Array | None = None
    """For a scale per channel: counts are of x / scale, rounded, and edges in steps."""
    home: Graph | None = None
    """The graph or body that contains it."""

    @property
    def expected(self) -> float | None:
        """The fraction of values outside of the range in calibration, if known."""
        return None if self.calibrated is None else self.calibrated.clipped

    @property
    def calibrated_use(self) -> float | None:
        """The part of the range that the calibration data spans."""
        found = self.calibrated
        if found is None or self.scale is not None:
            return None
        return used_part(found.low, found.high, self.low, self.high)


def used_part(minimum: float, maximum: float, low: float, high: float) -> float:
    """The part of low ... high that minimum ... maximum spans, 0 included; at most 1."""
    if not high > low:
        return 1.0
    top, bottom = min(max(maximum, 0.0), high), max(min(minimum, 0.0), low)
    return max(top - bottom, 0.0) / (high - low)


@dataclass(frozen=True)
class Found:
    """The tensors to watch, and the names and reasons of those that are not watched."""

    tensors: list[WatchedTensor]
    unwatched: dict[str, str]


def find_tensors(graph: Graph) -> Found:
    """The quantized activations of a graph: its own ones, then those in branches of `if`."""
    calibrated = {path: one for one in read_calibrated_ranges(graph.meta) for path in one.layers}
    found = Found([], {})
    _visit(graph, "", calibrated, LayerNames(graph), found)
    return Found(_distinct(found.tensors), found.unwatched)


def _visit(
    graph: Graph, path: str, calibrated: Calibrated, layers: LayerNames, found: Found
) -> None:
    names = _Names(graph, path, calibrated, layers)
    seen: set[tuple[Value, bytes]] = set()
    for node in graph.nodes:
        if node.op not in QUANTIZERS or _is_weight(node):
            continue
        name, known = names.of(node)
        made = (_static if node.op == "quantize" else _dynamic)(node, name, known)
        if isinstance(made, str):
            found.unwatched[name] = made
        elif (key := (made.value, made.edges.tobytes())) not in seen:
            seen.add(key)
            found.tensors.append(replace(made, home=graph))
    for node in graph.nodes:
        for branch in BRANCHES if node.op == "if" else ():
            inner = f"{path}{node.name}/{branch}/"
            _visit(node.bodies[branch], inner, calibrated, layers, found)
        for _, inside in (pair for body in node.bodies.values() for pair in body.walk()):
            if node.op != "if" and inside.op in QUANTIZERS and not _is_weight(inside):
                found.unwatched[f"{path}{node.name}: {inside.name}"] = "it is in the body of a loop"


def _distinct(tensors: list[WatchedTensor]) -> list[WatchedTensor]:
    """The tensors with a number behind names that occur before."""
    counts: dict[str, int] = {}
    found = []
    for one in tensors:
        counts[one.name] = number = counts.get(one.name, 0) + 1
        name = one.name if number == 1 else f"{one.name} #{number}"
        found.append(replace(one, name=name))
    return found


def _is_weight(node: Node) -> bool:
    """Whether a quantizer reads no data: only constants and parameters."""
    (x, *_) = node.inputs
    steps = 0
    while x is not None and x.node.op in ("transpose", "reshape", "cast") and steps < _STEPS:
        x, steps = x.node.inputs[0], steps + 1
    return x is None or x.node.op in ("constant", "parameter")


class _Names:
    """Names of tensors by the layers that read them."""

    def __init__(self, graph: Graph, path: str, calibrated: Calibrated, layers: LayerNames) -> None:
        self._path, self._calibrated, self._layers = path, calibrated, layers
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in node.operands:
                self._readers.setdefault(value, []).append(node)

    def of(self, node: Node) -> tuple[str, CalibratedRange | None]:
        """The name of a quantizer's tensor, and what calibration saw of it."""
        layers = [reader for level in self._levels(node) for reader in level]
        for reader in layers:
            path = self._path + reader.name.removesuffix(EQUALIZED)
            if (found := self._calibrated.get(path)) is not None:
                return f"{found.layers[path]} input", found
        for reader in layers:
            if get(reader.op).kind is Kind.COMPUTE:
                return f"{self._layers.readable(self._path + reader.name)} input", None
        (x, *_) = node.operands
        return self._path + x.name, None

    def _levels(self, node: Node) -> Iterator[list[Node]]:
        """The nodes that read a quantizer's results, by distance, up to the next quantizer."""
        level, seen = [node], {node}
        for _ in range(_STEPS):
            readers = [r for n in level for v in n.outputs for r in self._readers.get(v, ())]
            level = list(dict.fromkeys(r for r in readers if r not in seen))
            level = [reader for reader in level if reader.op not in QUANTIZERS]
            seen.update(level)
            yield level


def _static(node: Node, name: str, calibrated: CalibratedRange | None) -> WatchedTensor | str:
    (x, scale_value, zero_value) = (*node.inputs, None)[:3]
    assert x is not None
    scale, to = constant_value(scale_value), node.attrs["to"]
    zero = np.zeros((), np.int64) if zero_value is None else constant_value(zero_value)
    if scale is None or zero is None:
        return "its scale is computed at run time, so nothing is clipped"
    if not to.is_integer:
        return f"its values are {to}, which do not fill a range evenly"
    if node.attrs.get("block"):
        return "it has a scale per block"
    if not (np.isfinite(scale.astype(np.float64)).all() and (scale.astype(np.float64) > 0).all()):
        return "its scale is not a positive number"
    calibrated = calibrated if calibrated is not None and calibrated.scheme == "static" else None
    zero = zero.astype(np.int64)
    if scale.size > 1:
        return _per_channel(node, name, scale, zero, to)
    steps = int(to.min - zero.item()), int(to.max - zero.item())
    element = f64 if x.dtype == f64 else f32
    step = float(scale.item())
    # A range that begins at 0 may stand for a relu, which clips on purpose.
    is_relu = calibrated is None and steps[0] == 0
    precision = node.attrs.get("precision")

    def divided(v: float) -> float:
        return float(np.rint(quotient(np.asarray(v, element.numpy), scale, precision)).item())

    low_edge = _last(lambda v: divided(v) < steps[0], steps[0] * step, step, element)
    high_edge = _last(lambda v: divided(v) <= steps[1], steps[1] * step, step, element)
    low, high = steps[0] * step, steps[1] * step
    edges = _edges(-np.inf if is_relu else low_edge, high_edge, low, high, element)
    return WatchedTensor(name, x, True, low, high, edges, calibrated)


def _per_channel(
    node: Node, name: str, scale: Array, zero: Array, to: DType
) -> WatchedTensor | str:
    """Counts of rounded quotients; all channels must have the same zero point."""
    if zero.size > 1 and (zero != zero.reshape(-1)[0]).any():
        return "its zero points differ between channels"
    (x, *_) = node.operands
    if x.dtype != f32 or scale.dtype != np.float32 or "precision" in node.attrs:
        return "it has a scale per channel and is not f32"
    axis = node.attrs["axis"] % x.rank
    spread = scale.reshape([-1 if i == axis else 1 for i in range(x.rank)])
    offset = int(zero.reshape(-1)[0])
    low, high = float(to.min - offset), float(to.max - offset)
    first = -np.inf if low == 0 else low - 0.5
    edges = _edges(first, high + 0.5, low, high, f32)
    return WatchedTensor(name, x, True, low, high, edges, None, spread)


def _dynamic(node: Node, name: str, calibrated: CalibratedRange | None) -> WatchedTensor | str:
    (x, *_) = node.operands
    if calibrated is None or calibrated.scheme == "static":
        return (
            "its range is computed at run time, so nothing is clipped, and the model's file "
            "has no calibrated range to compare with"
        )
    low, high = calibrated.low, calibrated.high
    element = f64 if x.dtype == f64 else f32
    below = np.nextafter(np.asarray(low, element.numpy), np.asarray(-np.inf, element.numpy))
    edges = _edges(below.item(), high, low, high, element)
    return WatchedTensor(name, x, False, low, high, edges, calibrated)


def _edges(first: float, last: float, low: float, high: float, element: DType) -> Array:
    """The outer edges, and 1/2 ... 1/16 of both sides of the range."""
    parts = [0.5**k for k in range(1, OCTAVES + 1)]
    below = [low * part if low < 0 else first for part in parts]
    above = [high * part if high > 0 else last for part in reversed(parts)]
    edges = np.array([first, *below, *above, last], element.numpy)
    return np.maximum.accumulate(edges)


def _last(holds: Callable[[float], bool], near: float, step: float, element: DType) -> float:
    """The largest number of a type for which `holds` is true; it is true below a threshold."""
    kind = element.numpy.type
    low, high = kind(near - 2 * step), kind(near + 2 * step)
    if not holds(float(low)) or holds(float(high)):  # quotients that overflow or vanish
        return float(high) if holds(float(high)) else float(low)
    while (middle := kind(low + (high - low) / 2)) not in (low, high):
        low, high = (middle, high) if holds(float(middle)) else (low, middle)
    return float(low)
