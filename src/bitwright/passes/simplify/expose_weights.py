"""Products with constant weights take the form that quantization expects, and keep their names.

    einsum(x, w)                     transposes, reshapes and one matmul (`expand_einsum`)
    matmul(x, w[1, 1, K, N])         matmul(x, w[K, N])
    matmul(x, reshape(transpose(w))) matmul with the rearranged weight as a constant of any size

Einsums without a constant operand stay.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.naming import made_from
from bitwright.passes.simplify.expand_einsum import expand, is_weight, why_not_expand
from bitwright.rewrite import Match, Rule, Trace, rewrite
from bitwright.rewrite.replace import replace_nodes

Array = np.ndarray[Any, Any]
_MOVES = ("transpose", "reshape")


def expose_weights(graph: Graph, trace: Trace) -> Graph:
    return replace_nodes(rewrite(graph, RULES, trace), _fold_reshape)


def _why_not_einsum(m: Match) -> str | bool:
    weights = [is_weight(value) and value.rank > 1 for value in m.root.operands]
    if m.root.outputs[0].dtype != f32 or not any(weights) or all(weights):
        return "it needs one weight and one other operand"
    return why_not_expand(m)


def _why_not_one_matrix(m: Match) -> str | bool:
    found = constant_value(m.w)
    if found is None or found.ndim < 3 or set(found.shape[:-2]) != {1}:
        return "its weight is not a single matrix with batch axes"
    return m.x.rank < 2 and "its input is a vector"


def _one_matrix(op: Any, m: Match) -> Any:
    with op.at(made_from(op.loc, [m.w])):
        w = op.constant(m.array("w").reshape(m.w.shape[-2:]), name="weight")
    y = op.matmul(m.x, w)
    shape = m.root.outputs[0].shape
    return y if y.shape == shape else op.reshape(y, shape=shape)


def _fold_reshape(node: Node) -> Node | list[Node]:
    """Folds a reshape of a constant, also behind transposes."""
    value = node.outputs[0] if node.op == "reshape" and len(node.outputs) == 1 else None
    found = None if value is None or value.dtype != f32 else _moved(value)
    if value is None or found is None or node.attr_symbols:
        return node
    array, source = found
    attrs, loc = {"value": array}, made_from(node.loc, [source])
    return [node.with_(op="constant", inputs=(), attrs=attrs, loc=loc)]


def _moved(value: Value) -> tuple[Array, Value] | None:
    """The result of transposes and reshapes of a constant, and that constant."""
    known = constant_value(value)
    if known is not None:
        return known, value
    node = value.node
    inner = None
    if node.op in _MOVES and node.inputs[0] is not None and not node.attr_symbols:
        inner = _moved(node.inputs[0])
    if inner is None:
        return None
    array, source = inner
    if node.op == "transpose":
        return array.transpose(node.attrs["perm"]), source
    return np.ascontiguousarray(array.reshape(value.shape)), source


RULES = [
    Rule("einsum-with-weight", lambda op: op.einsum(...), expand, _why_not_einsum),
    Rule(
        "product-with-one-matrix",
        lambda op, x, w: op.matmul(x, w),
        _one_matrix,
        _why_not_one_matrix,
    ),
]
