"""What symbolic inference had to take on trust, held against the sizes of a run.

Inference lets a symbol stand beside a constant (n beside 4: n must be 4, or 1 to broadcast) and
only a run can tell. Kernels read by strides and would leave their operands, so before the first run
with new sizes every node that rests on such trust is inferred again, with the sizes as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.errors import BitwrightError, RunError
from bitwright.ir.dim import Dim, evaluate
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import TensorType
from bitwright.ir.verify import place
from bitwright.ops.opdef import Kind
from bitwright.ops.registry import get

# One operand of any size gives a result: there is nothing to trust.
_SURE = frozenset({"identity", "transpose", "cast", "softmax", "log_softmax", "shape_of", "sizes"})


class SizeChecks:
    """The nodes of a graph whose sizes must be looked at again, and the look."""

    def __init__(self, graph: Graph, without: Iterable[Node] = ()) -> None:
        self.graph = graph
        skipped = set(without)
        self._open = [
            (node, inner)
            for node in graph.nodes
            if not node.is_boundary and node not in skipped
            for inner in _members(node)
            if _rests_on_trust(inner)
        ]

    def verify(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if these sizes do not fit together."""
        for node, inner in self._open:
            self._check(node, inner, bindings)

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None:
        """`verify` for nodes whose sizes are all known by now and that were not seen yet."""
        known = bindings.keys()
        for node, inner in self._open:
            if inner not in seen and all(s.name in known for s in _symbols(inner)):
                seen.add(inner)
                self._check(node, inner, bindings)

    def _check(self, node: Node, inner: Node, bindings: Mapping[str, int]) -> None:
        opdef = get(inner.op)
        types = [None if v is None else _resolved(v.type, bindings) for v in inner.inputs]
        fixed = sum(not operand.variadic for operand in opdef.operands)
        types += [None] * (fixed - len(types))
        attrs = {k: _resolved(v, bindings) for k, v in opdef.call_attrs(inner.attrs).items()}
        where = place(self.graph, node)
        try:
            result = opdef.infer(*types, **attrs)
        except BitwrightError as error:
            raise RunError(str(error), where=where) from None
        found = result if isinstance(result, tuple) else (result,)
        for value, type_ in zip(inner.outputs, found, strict=True):
            expected = _resolved(value.type, bindings)
            if isinstance(type_, TensorType) and not _agree(expected, type_):
                raise RunError(
                    f"result {value} has another shape than inferred",
                    where=where,
                    expected=f"{value.type} with {dict(bindings)}",
                    found=type_,
                )


def _members(node: Node) -> Iterable[Node]:
    if node.op != "fused":
        return (node,)
    return (inner for inner in node.attrs["body"].nodes if not inner.is_boundary)


def _symbols(node: Node) -> set[Any]:
    values = (*node.operands, *node.outputs)
    return {s for v in values if isinstance(v.type, TensorType) for s in v.type.symbols}


def _rests_on_trust(node: Node) -> bool:
    types = [value.type for value in (*node.operands, *node.outputs)]
    if node.op in _SURE or not _symbols(node):
        return False
    if any(not isinstance(type_, TensorType) for type_ in types):
        return False  # only host steps take it
    opdef = get(node.op)
    if any(attr.kind == "graph" for attr in opdef.attrs.values()):
        return False
    if opdef.kind is not Kind.ELEMENTWISE:
        return True
    shape = node.outputs[0].shape
    return any(
        size not in (1, whole)
        for value in node.operands
        for size, whole in zip(reversed(value.shape), reversed(shape), strict=False)
    )


def _resolved(item: Any, bindings: Mapping[str, int]) -> Any:
    """A type or an attribute with numbers for sizes."""
    if isinstance(item, TensorType):
        return item.with_shape(item.concrete(bindings))
    if isinstance(item, Dim):
        return evaluate(item, bindings)
    if isinstance(item, tuple):
        return tuple(_resolved(part, bindings) for part in item)
    return item


def _agree(expected: TensorType, found: TensorType) -> bool:
    """Whether shapes are equal; a size that only the data decides fits any."""
    return len(expected.shape) == len(found.shape) and all(
        isinstance(b, Dim) or a == b for a, b in zip(expected.shape, found.shape, strict=True)
    )
