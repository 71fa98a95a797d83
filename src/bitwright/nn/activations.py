"""Gradients of activations: x and dy to dx."""

from __future__ import annotations

from typing import Any

from bitwright.nn.compiled import Array, gradients, require_same


def relu_backward(x: Any, dy: Any) -> Array:
    """The gradient of max(x, 0); that at 0 is 0."""
    return _backward("relu", x, dy)


def gelu_backward(x: Any, dy: Any, approximate: str = "none") -> Array:
    """The gradient of gelu: exact, or of its approximation "tanh"."""
    return _backward("gelu", x, dy, approximate=approximate)


def quick_gelu_backward(x: Any, dy: Any) -> Array:
    """The gradient of x sigmoid(1.702 x)."""
    return _backward("quick_gelu", x, dy)


def silu_backward(x: Any, dy: Any) -> Array:
    """The gradient of x sigmoid(x)."""
    return _backward("silu", x, dy)


def sigmoid_backward(x: Any, dy: Any) -> Array:
    """The gradient of 1 / (1 + exp(-x))."""
    return _backward("sigmoid", x, dy)


def tanh_backward(x: Any, dy: Any) -> Array:
    """The gradient of tanh(x)."""
    return _backward("tanh", x, dy)


def softplus_backward(x: Any, dy: Any) -> Array:
    """The gradient of log(1 + exp(x))."""
    return _backward("softplus", x, dy)


def mish_backward(x: Any, dy: Any) -> Array:
    """The gradient of x tanh(softplus(x))."""
    return _backward("mish", x, dy)


def hard_swish_backward(x: Any, dy: Any) -> Array:
    """The gradient of x clip(x / 6 + 1/2, 0, 1)."""
    return _backward("hard_swish", x, dy)


def elu_backward(x: Any, dy: Any, alpha: float = 1.0) -> Array:
    """The gradient of x, or alpha (exp(x) - 1) where x is negative."""
    return _backward("elu", x, dy, alpha=alpha)


def leaky_relu_backward(x: Any, dy: Any, alpha: float = 0.01) -> Array:
    """The gradient of x, or alpha x where x is negative."""
    return _backward("leaky_relu", x, dy, alpha=alpha)


def _backward(op: str, x: Any, dy: Any, **attrs: Any) -> Array:
    require_same(x=x, dy=dy)
    return gradients(op, {"x": x}, dy, ("x",), **attrs)[0]
