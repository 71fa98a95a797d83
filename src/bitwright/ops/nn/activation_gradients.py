"""Derivatives of activation functions, for `chain`: f'(x) from x and y = f(x).

A derivative that y alone gives is written in terms of y, which the next layer keeps anyway.
"""

from __future__ import annotations

import math
from typing import Any

from bitwright.ir.graph import Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import where_or_zero
from bitwright.ops.core.reverse import Gradients

TANH_GELU = math.sqrt(2 / math.pi)


def sigmoid(b: Builder, x: Value, y: Value) -> Any:
    return b.mul(y, b.sub(1.0, y))


def softplus(b: Builder, x: Value, y: Value) -> Any:
    return b.sigmoid(x)


def softsign(b: Builder, x: Value, y: Value) -> Any:
    size = b.add(b.abs(x), 1.0)
    return b.reciprocal(b.mul(size, size))


def swish(b: Builder, x: Value, y: Value, alpha: float = 1.0) -> Any:
    """With s = sigmoid(alpha x) and y = x s: s + alpha y (1 - s)."""
    gate = b.sigmoid(x if alpha == 1 else b.mul(x, alpha))
    rest = b.mul(y, b.sub(1.0, gate))
    return b.add(gate, rest if alpha == 1 else b.mul(rest, alpha))


def mish(b: Builder, x: Value, y: Value) -> Any:
    """With t = tanh(softplus(x)): t + x (1 - t²) sigmoid(x)."""
    gate = b.tanh(b.softplus(x))
    slope = b.mul(b.sub(1.0, b.mul(gate, gate)), b.sigmoid(x))
    return b.add(gate, b.mul(x, slope))


def hard_swish(b: Builder, x: Value, y: Value) -> Any:
    """0 below -3, 1 above 3, and x/3 + 1/2 between."""
    between = b.add(b.mul(x, 1 / 3), 0.5)
    return b.where(b.lt(x, -3.0), 0.0, b.where(b.gt(x, 3.0), 1.0, between))


def elu(b: Builder, x: Value, y: Value, alpha: float = 1.0, gamma: float = 1.0) -> Any:
    """gamma above 0; below it gamma alpha exp(x) = y + gamma alpha."""
    above = b.gt(y if alpha >= 0 and gamma >= 0 else x, 0.0)
    return b.where(above, gamma, b.add(y, alpha * gamma))


def celu(b: Builder, x: Value, y: Value, alpha: float) -> Any:
    """1 above 0; below it exp(x / alpha) = y / alpha + 1."""
    return b.where(b.gt(x, 0.0), 1.0, b.add(b.mul(y, 1 / alpha), 1.0))


def gelu(b: Builder, x: Value, y: Value, approximate: str) -> Any:
    """P(normal <= x) + x times the density, or the derivative of the tanh approximation.

    With s = sigmoid(2 u), u the argument of the tanh: y = x s and y' = s + 2 u' y (1 - s).
    """
    square = b.mul(x, x)
    if approximate == "tanh":
        gate = b.sigmoid(b.mul(x, b.add(b.mul(square, 2 * TANH_GELU * 0.044715), 2 * TANH_GELU)))
        slope = b.add(b.mul(square, 6 * TANH_GELU * 0.044715), 2 * TANH_GELU)
        return b.add(gate, b.mul(b.mul(y, b.sub(1.0, gate)), slope))
    share = b.mul(b.add(b.erf(b.mul(x, math.sqrt(0.5))), 1.0), 0.5)
    density = b.mul(b.exp(b.mul(square, -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.add(share, b.mul(x, density))


# rules of activations with pieces: a factor 0 or 1 is a choice, and no product


def grad_relu(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """0 where y is not above 0; a NaN passes dy, as in PyTorch."""
    return [b.where(b.le(node.outputs[0], 0.0), 0.0, dys[0])]


def grad_hard_sigmoid(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    y = node.outputs[0]
    inside = b.and_(b.gt(y, 0.0), b.lt(y, 1.0))
    return [where_or_zero(b, inside, b.mul(dys[0], node.attrs["alpha"]))]


def grad_leaky_relu(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy above 0, else alpha dy; y has the sign of x if alpha is not negative."""
    alpha = node.attrs["alpha"]
    above = b.gt(node.outputs[0] if alpha >= 0 else node.inputs[0], 0.0)
    return [b.where(above, dys[0], b.mul(dys[0], alpha))]


def grad_thresholded_relu(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [where_or_zero(b, b.gt(node.inputs[0], node.attrs["alpha"]), dys[0])]


def grad_shrink(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    x, limit = node.inputs[0], node.attrs["lambd"]
    return [where_or_zero(b, b.or_(b.lt(x, -limit), b.gt(x, limit)), dys[0])]
