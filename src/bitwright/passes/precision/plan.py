"""The precision of each node: that of the policy, unless it would damage a value.

These nodes stay in full precision, with a reason, unless a pattern of the policy names them:

    integers   values cast from integers that a half type cannot represent (positions, lengths), up
               to the first function of them (a sine, a comparison), and values cast to integers
    quantized  integer and float8 sums until they are scaled, dynamic scales, and inputs of a
               requantize
    too large  a constant or observed value that would overflow to infinity
    too small  a constant or observed value that would underflow to zero

Readers of a value that is too large stay in full precision too, until one of them bounds it. So do
readers of a value with a small epsilon, until something is divided by it or multiplied with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.ir.dtype import DType, bf16, f16, f32, f64, holds_exactly
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.passes.precision.policy import Policy, kind_of

HALVES = (f16, bf16)
CHANGEABLE = (f64, f32, f16, bf16)
_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "floor", "ceil", "round", "trunc", "mod", "pow"}
    | {"maximum", "minimum", "where", "relu"}
)
"""Elementwise ops whose results have the magnitude, and the exactness, of their operands."""
_GUARDS = frozenset({"add", "maximum", "clip", "where"})
"""Ops that add an epsilon to a value, or bound it by one."""
_INVERTS = frozenset({"sqrt", "rsqrt", "reciprocal", "log", "pow", "abs", "neg"})
"""Ops whose result still depends on the epsilon."""


@dataclass(frozen=True)
class Extent:
    """The largest finite magnitude observed of a value."""

    largest: float


@dataclass(frozen=True)
class Decision:
    """The precision of a node (None: its types do not change), and why it is not the policy's."""

    precision: DType | None
    reason: str = ""


Extents = Mapping[str, Extent]


def is_changeable(value: Value | None) -> bool:
    """Whether a policy may change the type of this value."""
    return value is not None and isinstance(value.type, TensorType) and value.dtype in CHANGEABLE


def changeable_operands(node: Node) -> Iterator[tuple[int, Value]]:
    """The floating-point operands that take the precision of a node, with their positions."""
    opdef = get(node.op)
    names = [operand.name for operand in opdef.operands]
    for position, value in enumerate(node.inputs):
        name = names[min(position, len(names) - 1)] if names else ""
        if value is not None and is_changeable(value) and name not in opdef.keeps:
            yield position, value


class Plan:
    """The decisions for one graph; bodies have their own plans."""

    def __init__(self, graph: Graph, policy: Policy, extents: Extents | None = None) -> None:
        self.graph, self.policy, self.extents = graph, policy, extents or {}
        self._to_integers = _cast_to_integers(graph)
        self._counted: set[Value] = set()
        self._unscaled: set[Value] = set()
        self._large: set[Value] = set()
        self._guarded: set[Value] = set()
        self.decisions: dict[Node, Decision] = {
            node: self._decide(node) for node in graph.nodes if not node.is_boundary
        }

    def _decide(self, node: Node) -> Decision:
        if get(node.op).fixed_types or node.bodies:
            if node.op == "dynamic_quantize":
                self._unscaled.add(node.outputs[1])
            return Decision(None, "its types do not change")
        if node.attrs.get("int8"):
            return Decision(f32, "it quantizes f32 values")
        operands = [value for _, value in changeable_operands(node)]
        makes_float = node.op in ("cast", "dequantize") and is_changeable(node.outputs[0])
        if not operands and not makes_float:
            return Decision(None)
        given = self.policy.of_pattern(node)
        wanted = given or self.policy.of_kind(kind_of(node.op))
        if wanted not in HALVES:
            return Decision(wanted)
        reason = self._reason(node, operands, wanted)
        return Decision(f32, reason) if reason and given is None else Decision(wanted)

    def _reason(self, node: Node, operands: list[Value], wanted: DType) -> str:
        """Why a node must not be computed in `wanted`; marks its results for their readers."""
        if self._is_unscaled(node, operands):
            return "it scales a sum of quantized products"
        is_counted = self._is_counted(node, operands, wanted)
        extreme = self._extreme(node, operands, wanted)
        if is_counted:
            return f"it computes with integers that {wanted} cannot represent"
        return "its result is cast to integers" if node in self._to_integers else extreme

    def _is_unscaled(self, node: Node, operands: list[Value]) -> bool:
        """Whether a node reads an unscaled integer sum or a dynamic scale; a mul ends that."""
        source = node.inputs[0] if node.op == "cast" else None
        is_sum = source is not None and source.node.op.startswith("integer_")
        is_sum |= any(value.node.op == "f8_matmul" for value in operands)
        if not is_sum and not any(value in self._unscaled for value in operands):
            return False
        if node.op != "mul":
            self._unscaled.update(v for v in node.outputs if is_changeable(v))
        return True

    def _extreme(self, node: Node, operands: list[Value], wanted: DType) -> str:
        """Which operand or result does not fit the half type."""
        for value in operands:
            largest = self._largest(value)
            if value in self._large or (largest is not None and largest > wanted.max):
                if _carries(node):
                    self._large.update(v for v in node.outputs if is_changeable(v))
                return f"{value} is too large for {wanted}"
            if largest is not None and 0 < largest < _least(wanted):
                if node.op in _GUARDS:
                    self._guarded.update(node.outputs)
                return f"{value} would underflow to zero in {wanted}"
            if value in self._guarded:
                if node.op in _INVERTS or kind_of(node.op) is Kind.MOVEMENT:
                    self._guarded.update(v for v in node.outputs if is_changeable(v))
                return f"{value} has an epsilon that underflows in {wanted}"
        for value in node.outputs:
            observed = self.extents.get(value.name)
            if observed is not None and is_changeable(value) and observed.largest > wanted.max:
                self._large.add(value)
                return f"its result reaches {observed.largest:.3g}, too large for {wanted}"
            if observed is not None and 0 < observed.largest < _least(wanted):
                return f"its result stays below {observed.largest:.3g}, too small for {wanted}"
        return ""

    def _largest(self, value: Value) -> float | None:
        """The largest finite magnitude of a value, if it is known."""
        array = value.node.attrs.get("value") if value.node.is_boundary else None
        if array is None:
            observed = self.extents.get(value.name)
            return None if observed is None else observed.largest
        return largest_magnitude(array)

    def _is_counted(self, node: Node, operands: list[Value], wanted: DType) -> bool:
        source = node.inputs[0] if node.op == "cast" else None
        if source is not None and isinstance(source.type, TensorType) and source.dtype.is_integer:
            if holds_exactly(wanted, source.dtype):
                return False
            self._counted.update(node.outputs)
            return True
        varying = [v for v in operands if v.node.op not in ("constant", "parameter")]
        if not varying or not all(v in self._counted for v in varying) or not _is_close(node):
            return False
        if _carries(node):
            self._counted.update(v for v in node.outputs if is_changeable(v))
        return True


def largest_magnitude(array: np.ndarray[Any, Any]) -> float:
    """The largest finite magnitude; 0 for none.

    Without their sign bit, finite floats are ordered as the integers of the same bits, whose
    maximum is found several times faster.
    """
    is_known = array.dtype.name in ("float32", "float16", "bfloat16")
    if is_known and array.size and array.flags.c_contiguous:
        word = np.dtype(f"u{array.itemsize}")
        bits = (array.reshape(-1).view(word) & word.type(np.iinfo(word).max >> 1)).max()
        found = float(np.array([bits], word).view(array.dtype)[0])
        if np.isfinite(found):
            return found
    size = np.abs(np.asarray(array, np.float64))
    return float(size.max(initial=0.0, where=np.isfinite(size)))


def _carries(node: Node) -> bool:
    """Whether results may be as large as the operands, or integers like them."""
    kind = kind_of(node.op)
    return (
        node.op in _ARITHMETIC
        or kind is Kind.MOVEMENT
        or node.op.startswith(("reduce_", "cum"))
        or kind is Kind.COMPUTE
    )


def _is_close(node: Node) -> bool:
    """Whether results of integers are integers too: not for sums of many products."""
    if kind_of(node.op) is not Kind.COMPUTE:
        return True
    return node.op == "matmul" and node.inputs[0] is not None and node.inputs[0].shape[-1] == 1


def _cast_to_integers(graph: Graph) -> set[Node]:
    """Elementwise and movement nodes whose results are cast or rounded to integers."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        source = node.inputs[0] if node.op == "cast" and node.inputs else None
        starts = (
            source is not None
            and is_changeable(source)
            and isinstance(node.types[0], TensorType)
            and node.types[0].dtype.is_integer
        ) or node.op == "requantize"
        if not starts and node not in found:
            continue
        for value in node.operands:
            kind = None if value.node.is_boundary else kind_of(value.node.op)
            if is_changeable(value) and kind in (Kind.ELEMENTWISE, Kind.MOVEMENT):
                found.add(value.node)
    return found


def _least(element: DType) -> float:
    """The smallest normal number of a type."""
    return float(ml_dtypes.finfo(element.numpy).smallest_normal)  # type: ignore[no-untyped-call]
