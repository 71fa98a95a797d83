"""Folds batch normalization, and any per-channel scale and shift, into the layer before it.

    batch_norm(x) = x * s + t,  s = scale / sqrt(var + eps),  t = bias - mean * s
    conv(x, w, b) * s + t       = conv(x, w * s, b * s + t)         s, t per output channel

The same holds for matmul (last axis) and transposed convolution (second axis of the weight).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Graph
from bitwright.ir.naming import made_from
from bitwright.rewrite import Match, Rule, Trace, rewrite

Array = np.ndarray[Any, Any]


def fold_batch_norm(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _why_not_batch_norm(m: Match) -> str | bool:
    return not m.is_constant("scale", "bias", "mean", "var") and "its statistics are not constants"


def _scale_and_shift(op: Any, x: Any, m: Match) -> Any:
    """batch_norm -> mul, add over channels, shaped to broadcast along axis 1."""
    scale, bias, mean, var = (
        m.array(n).astype(np.float64) for n in ("scale", "bias", "mean", "var")
    )
    factor = scale / np.sqrt(var + m.root.attrs["eps"])
    shift = bias - mean * factor
    shape = (-1,) + (1,) * max(x.rank - 2, 0)
    element = x.dtype.numpy
    scaled = op.mul(x, factor.reshape(shape).astype(element))
    return op.add(scaled, shift.reshape(shape).astype(element))


def _channels(constant: Array, rank: int, axis: int, count: Any) -> Array | None:
    """A constant that varies along one axis only, as a vector of `count` elements, or None."""
    full = constant.reshape((1,) * (rank - constant.ndim) + constant.shape)
    if any(size != 1 for a, size in enumerate(full.shape) if a != axis % rank):
        return None
    return np.broadcast_to(full.reshape(-1), (count,)).astype(np.float64)


def _weight_axis(node: Any) -> int:
    return {"conv": 0, "conv_transpose": 1, "matmul": -1}[node.op]


def _result_axis(node: Any) -> int:
    return -1 if node.op == "matmul" else 1


def _vector(m: Match) -> Array | None:
    node = m.layer
    count = node.outputs[0].shape[_result_axis(node)]
    if not isinstance(count, int):
        return None
    return _channels(m.array("c"), node.outputs[0].rank, _result_axis(node), count)


def _why_not_fold(m: Match) -> str | bool:
    if not m.is_constant("w"):
        return "the weight is not a constant"
    if not m.is_constant("c") or (m.bindings.get("b") is not None and not m.is_constant("b")):
        return "the factor or the bias is not a constant"
    if m.layer.op == "conv_transpose" and m.layer.attrs["groups"] != 1:
        return "a grouped transposed convolution shares weights between output channels"
    if m.layer.op == "matmul" and m.w.rank < 2:
        return "the weight is a vector"
    if m.uses(m.layer.outputs[0]) != 1:
        return "the layer's result has another reader"
    if _vector(m) is None:
        return "the constant is not per output channel"
    return m.root.outputs[0].shape != m.layer.outputs[0].shape and "it broadcasts the result"


def _scaled_weight(m: Match, factor: Array) -> Array:
    weight = m.array("w").astype(np.float64)
    shape = [1] * weight.ndim
    shape[_weight_axis(m.layer)] = -1
    if m.layer.op == "matmul":
        shape[-1] = factor.size
    return (weight * factor.reshape(shape)).astype(m.w.dtype.numpy)


def _absorb_factor(op: Any, x: Any, m: Match) -> Any:
    factor = _vector(m)
    assert factor is not None
    with op.at(made_from(op.loc, [m.w])):
        weight = op.constant(_scaled_weight(m, factor), name="weight")
    if m.bindings.get("b") is None:
        return op.like(m.layer, x, weight)
    bias = (m.array("b").astype(np.float64) * factor).astype(m.w.dtype.numpy)
    return op.like(m.layer, x, weight, op.constant(bias, name="bias"))


def _absorb_shift(op: Any, x: Any, m: Match) -> Any:
    shift = _vector(m)
    assert shift is not None
    if m.bindings.get("b") is not None:
        shift = shift + m.array("b").astype(np.float64)
    bias = op.constant(shift.astype(m.w.dtype.numpy), name="bias")
    return op.like(m.layer, x, m.w, bias)


RULES = [
    Rule(
        "batch-norm-as-scale-and-shift",
        lambda op, x, scale, bias, mean, var: op.batch_norm(x, scale, bias, mean, var),
        _scale_and_shift,
        _why_not_batch_norm,
    ),
    *(
        Rule(
            f"{what}-into-{name}",
            lambda op, x, w, b, c, layer=layer, join=join: getattr(op, join)(
                getattr(op, layer)(x, w, op.maybe(b), as_="layer"), c
            ),
            absorb,
            _why_not_fold,
        )
        for layer, name in (("conv", "conv"), ("conv_transpose", "transposed-conv"))
        for what, join, absorb in (
            ("factor", "mul", _absorb_factor),
            ("shift", "add", _absorb_shift),
        )
    ),
    Rule(
        "factor-into-matmul",
        lambda op, x, w, c: op.mul(op.matmul(x, w, as_="layer"), c),
        _absorb_factor,
        _why_not_fold,
    ),
]
