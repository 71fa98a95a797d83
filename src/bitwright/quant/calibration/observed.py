"""The values of a graph that calibration observes by default.

Every floating value that a run stores, except

    moved data      reshape, transpose, expand, ...: shares the statistics of its source
    masks           built from infinite constants, for a softmax

Values inside a fused region (`passes.fuse.fuse_regions`: e.g. a convolution's result before its
activation) are not stored, so a quantized model does not quantize them.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.ir.graph import Graph, Value, constant_value
from bitwright.ir.paths import value_paths
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.passes.fuse.fuse_regions import Fusion
from bitwright.rewrite.trace import Trace

# Ops whose result contains exactly the values of their first operand.
MOVES = frozenset({"reshape", "transpose", "expand", "identity", "roll"})
# Ops that propagate infinities of masks and masked scores.
_CARRIES = frozenset({"add", "sub", "mul", "where", "cast", "min", "max", "neg"})
ALMOST_INFINITE = 1e30
"""Exporters write the lowest finite number instead of minus infinity."""


def observed_values(graph: Graph, inside: bool = False) -> tuple[list[str], dict[str, str]]:
    """Paths of the values to observe, and the source of each value that only moves one of them.

    `inside` adds the values inside fused regions.
    """
    skipped = set(_masks(graph))
    if not inside:
        skipped.update(_inside_regions(graph))
    names: list[str] = []
    same: dict[str, str] = {}
    paths = {value: path for path, value in value_paths(graph).items()}
    for value, path in paths.items():
        if not _is_computed(value) or value in skipped:
            continue
        source = value
        while source.node.op in MOVES and source.node.inputs[0] is not None:
            source = source.node.inputs[0]
        if source is value:
            names.append(path)
        elif source in paths and _is_computed(source):
            same[path] = paths[source]
    return names, same


def _is_computed(value: Value) -> bool:
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.dtype.is_float or type_.dtype.bits < 16:
        return False
    return value.node.op not in ("constant", "parameter", "state")


def _inside_regions(graph: Graph) -> Iterator[Value]:
    for owner in {id(owner): owner for owner, _ in graph.walk()}.values():
        for region in Fusion(owner, Trace()).regions():
            for node in region.nodes[:-1]:
                yield from node.outputs


def _masks(graph: Graph) -> Iterator[Value]:
    found: set[Value] = set()
    for _, node in graph.walk():
        if node.is_boundary:
            continue
        carries = any(v in found for v in node.operands) and (
            node.op in _CARRIES or get(node.op).kind is Kind.MOVEMENT
        )
        if carries or (node.op in _CARRIES and any(map(_is_infinite, node.operands))):
            found.update(node.outputs)
            yield from node.outputs


def _is_infinite(value: Value) -> bool:
    array = constant_value(value)
    if array is None or not isinstance(value.type, TensorType) or not value.dtype.is_float:
        return False
    if not array.size:
        return False
    return max(-float(array.min()), float(array.max())) >= ALMOST_INFINITE
