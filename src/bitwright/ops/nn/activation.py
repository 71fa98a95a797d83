"""Activation functions: y = f(x) on real floating numbers (relu on integers too).

At the infinities the result is IEEE arithmetic applied to the formula, as in ONNX and PyTorch:
x * sigmoid(x) is NaN at -inf, although its limit is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from bitwright.ops.core.derivatives import chain
from bitwright.ops.core.opdef import Array, Attr, OpDef
from bitwright.ops.core.scalar import erf
from bitwright.ops.math.unary import expm1_scalar, log1p_scalar, real_float, real_number, unary
from bitwright.ops.nn import activation_gradients as slopes

_SELU_ALPHA = 1.67326319217681884765625
_SELU_GAMMA = 1.05070102214813232421875
# -2 u = x (TANH_GELU_LINEAR + TANH_GELU_CUBIC x²), u the argument of the tanh
TANH_GELU_LINEAR = -2 * slopes.TANH_GELU
TANH_GELU_CUBIC = TANH_GELU_LINEAR * 0.044715


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    small: Array = np.exp(-np.abs(x))
    result: Array = np.where(x < 0, small, 1) / (1 + small)
    return result


def softplus(x: Array) -> Array:
    """log(1 + exp(x))"""
    return np.logaddexp(0, x)


def gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        gate: Array = np.tanh(slopes.TANH_GELU * (x + 0.044715 * x**3))
    else:
        gate = erf(x / math.sqrt(2))
    gated: Array = 0.5 * x * (1 + gate)
    return gated


def celu(x: Array, alpha: float) -> Array:
    return np.maximum(0, x) + np.minimum(0, alpha * np.expm1(x / alpha))


def shrink(x: Array, lambd: float, bias: float) -> Array:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0))


def hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    return np.maximum(0, np.minimum(1, alpha * x + beta))


def _sigmoid_scalar(e: Any, x: Any) -> Any:
    return e.div(1.0, e.add(e.exp(e.neg(x)), 1.0))


def _softplus_scalar(e: Any, x: Any) -> Any:
    return e.add(e.max(x, 0.0), log1p_scalar(e, e.exp(e.neg(e.abs(x)))))


def _swish_scalar(e: Any, x: Any, alpha: float = 1.0) -> Any:
    """x / (1 + exp(-alpha x)): one rounding less than a product with the sigmoid."""
    power = e.neg(x) if alpha == 1 else e.mul(x, -alpha)
    return e.div(x, e.add(e.exp(power), 1.0))


def _gelu_scalar(e: Any, x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        return _tanh_gelu_scalar(e, x)
    gate = e.erf(e.mul(x, math.sqrt(0.5)))
    return e.mul(e.mul(x, 0.5), e.add(gate, 1.0))


def _tanh_gelu_scalar(e: Any, x: Any) -> Any:
    """x / (1 + exp(-2 u)) with u the argument of the tanh. It equals x (1 + tanh u) / 2 and has no
    cancellation where tanh u is near -1."""
    slope = e.add(e.mul(e.mul(x, x), TANH_GELU_CUBIC), TANH_GELU_LINEAR)
    return e.div(x, e.add(e.exp(e.mul(x, slope)), 1.0))


def _elu_scalar(e: Any, x: Any, alpha: float) -> Any:
    return e.select(e.gt(x, 0.0), x, e.mul(expm1_scalar(e, x), alpha))


def _celu_scalar(e: Any, x: Any, alpha: float) -> Any:
    curve = e.mul(expm1_scalar(e, e.div(x, alpha)), alpha)
    return e.add(e.max(x, 0.0), e.min(curve, 0.0))


def _shrink_scalar(e: Any, x: Any, lambd: float, bias: float) -> Any:
    above = e.select(e.gt(x, lambd), e.sub(x, bias), 0.0)
    return e.select(e.lt(x, -lambd), e.add(x, bias), above)


def _hard_sigmoid_scalar(e: Any, x: Any, alpha: float, beta: float) -> Any:
    return e.max(e.min(e.add(e.mul(x, alpha), beta), 1.0), 0.0)


def _activation(
    name: str,
    reference: Callable[..., Any],
    scalar: Callable[..., Any],
    doc: str,
    grad: Callable[..., Any],
    onnx: str = "",
    traits: Mapping[str, Any] = MappingProxyType({}),
    **attrs: float,
) -> OpDef:
    """An activation whose attributes are floats with these defaults; `traits` are OpDef fields."""
    return unary(
        name,
        reference,
        doc,
        scalar,
        infer=real_float,
        low=-4,
        high=4,
        grad=grad,
        onnx=onnx,
        attrs={key: Attr("float", default) for key, default in attrs.items()},
        variants=[{key: default + 0.25} for key, default in attrs.items()],
        **traits,
    )


_SHRINKS = {"shrinks": True}
_PROBABILITY = {"max_abs": 1.0, "never_negative": True}
_CHEAP = {"is_cheap": True}


OPDEFS = [
    unary(
        "relu",
        lambda x: np.maximum(x, 0),
        "max(x, 0)",
        lambda e, x: e.max(x, 0),
        infer=real_number,
        grad=slopes.grad_relu,
        onnx="Relu",
        is_cheap=True,
        shrinks=True,
        never_negative=True,
    ),
    _activation(
        "sigmoid",
        sigmoid,
        _sigmoid_scalar,
        "1 / (1 + exp(-x))",
        chain(slopes.sigmoid),
        "Sigmoid",
        _PROBABILITY,
    ),
    _activation(
        "softplus",
        softplus,
        _softplus_scalar,
        "log(1 + exp(x))",
        chain(slopes.softplus),
        onnx="Softplus",
    ),
    _activation(
        "softsign",
        lambda x: x / (1 + np.abs(x)),
        lambda e, x: e.div(x, e.add(e.abs(x), 1.0)),
        "x / (1 + |x|)",
        chain(slopes.softsign),
        onnx="Softsign",
    ),
    _activation(
        "silu",
        lambda x: x * sigmoid(x),
        _swish_scalar,
        "x * sigmoid(x)",
        chain(slopes.swish),
        traits=_SHRINKS,
    ),
    _activation(
        "swish",
        lambda x, alpha: x * sigmoid(alpha * x),
        _swish_scalar,
        "x * sigmoid(alpha * x)",
        chain(slopes.swish),
        alpha=1.0,
    ),
    _activation(
        "quick_gelu",
        lambda x, alpha: x * sigmoid(alpha * x),
        _swish_scalar,
        "x * sigmoid(alpha * x), which is near gelu(x)",
        chain(slopes.swish),
        alpha=1.702,
    ),
    _activation(
        "mish",
        lambda x: x * np.tanh(softplus(x)),
        lambda e, x: e.mul(x, e.tanh(_softplus_scalar(e, x))),
        "x * tanh(softplus(x))",
        chain(slopes.mish),
        onnx="Mish",
    ),
    _activation(
        "hard_swish",
        lambda x: x * hard_sigmoid(x, 1 / 6, 0.5),
        lambda e, x: e.mul(x, _hard_sigmoid_scalar(e, x, 1 / 6, 0.5)),
        "x * max(0, min(1, x/6 + 1/2))",
        chain(slopes.hard_swish),
        onnx="HardSwish",
        traits=_CHEAP | _SHRINKS,
    ),
    _activation(
        "hard_sigmoid",
        hard_sigmoid,
        _hard_sigmoid_scalar,
        "max(0, min(1, alpha * x + beta))",
        slopes.grad_hard_sigmoid,
        traits=_CHEAP | _PROBABILITY,
        alpha=0.2,
        beta=0.5,
    ),
    _activation(
        "elu",
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
        _elu_scalar,
        "x where x > 0, else alpha * (exp(x) - 1)",
        chain(slopes.elu),
        alpha=1.0,
    ),
    _activation(
        "selu",
        lambda x, alpha, gamma: gamma * np.where(x > 0, x, alpha * np.expm1(x)),
        lambda e, x, alpha, gamma: e.mul(_elu_scalar(e, x, alpha), gamma),
        "gamma * elu(x, alpha)",
        chain(slopes.elu),
        alpha=_SELU_ALPHA,
        gamma=_SELU_GAMMA,
    ),
    _activation(
        "celu",
        celu,
        _celu_scalar,
        "max(0, x) + min(0, alpha * (exp(x / alpha) - 1))",
        chain(slopes.celu),
        alpha=1.0,
    ),
    _activation(
        "leaky_relu",
        lambda x, alpha: np.where(x < 0, alpha * x, x),
        lambda e, x, alpha: e.select(e.lt(x, 0.0), e.mul(x, alpha), x),
        "alpha * x where x < 0, else x",
        slopes.grad_leaky_relu,
        traits=_CHEAP,
        alpha=0.01,
    ),
    _activation(
        "thresholded_relu",
        lambda x, alpha: np.where(x > alpha, x, 0),
        lambda e, x, alpha: e.select(e.gt(x, alpha), x, 0.0),
        "x where x > alpha, else 0",
        slopes.grad_thresholded_relu,
        alpha=1.0,
    ),
    _activation(
        "shrink",
        shrink,
        _shrink_scalar,
        "x + bias where x < -lambd, x - bias where x > lambd, else 0",
        slopes.grad_shrink,
        lambd=0.5,
        bias=0.0,
    ),
    unary(
        "gelu",
        gelu,
        "x * P(normal <= x): x/2 * (1 + erf(x / sqrt(2))), or its tanh approximation",
        _gelu_scalar,
        grad=chain(slopes.gelu),
        infer=real_float,
        low=-4,
        high=4,
        attrs={"approximate": Attr("str", "none", ("none", "tanh"))},
        variants=[{"approximate": "tanh"}],
        shrinks=True,
    ),
]
