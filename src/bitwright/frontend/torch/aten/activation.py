"""Activation functions and softmax."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps, maps_table
from bitwright.ir import DType, Value
from bitwright.ir.types import normalize_axis

_TORCH_THRESHOLD = 20.0  # softplus(x) rounds to x beyond it in f32
_SELU = {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}

for _name, _op in (
    ("silu", "silu"),
    ("mish", "mish"),
    ("hardswish", "hard_swish"),
    ("softsign", "softsign"),
):
    maps(f"{_name}.default")(lambda ctx, x, op=_op: ctx.b.op(op, x))


@maps("hardtanh.default")
def hardtanh(ctx: Context, x: Value, low: float = -1, high: float = 1) -> Value:
    return ctx.b.clip(x, ctx.operand(low), ctx.operand(high))


@maps("rrelu_with_noise_functional.default")
def rrelu(
    ctx: Context, x: Value, noise: Value, lower: float, upper: float, training: bool = False
) -> list[Value]:
    if training:
        raise ctx.refuse("its slope is random in training mode; call module.eval() first")
    return [ctx.b.leaky_relu(x, alpha=(lower + upper) / 2), noise]


@maps("elu.default")
def elu(
    ctx: Context, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Value:
    if input_scale != 1:  # scale * alpha * (exp(input_scale * x) - 1) below 0
        below = ctx.b.mul(ctx.b.expm1(ctx.b.mul(x, float(input_scale))), float(alpha))
        y = ctx.b.where(ctx.b.gt(x, 0.0), x, below)
    else:
        y = ctx.b.elu(x, alpha=alpha)
    return y if scale == 1 else ctx.b.mul(y, float(scale))


@maps("softplus.default")
def softplus(ctx: Context, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = x if beta == 1 else ctx.b.mul(x, float(beta))
    y = ctx.b.softplus(scaled)
    if beta != 1:
        y = ctx.b.div(y, float(beta))
    if threshold >= _TORCH_THRESHOLD:
        return y
    return ctx.b.where(ctx.b.gt(scaled, float(threshold)), x, y)


@maps("threshold.default")
def threshold(ctx: Context, x: Value, limit: float, value: float) -> Value:
    return ctx.b.where(ctx.b.gt(x, ctx.operand(limit)), x, ctx.operand(value))


@maps("prelu.default", "_prelu_kernel.default")
def prelu(ctx: Context, x: Value, slope: Value) -> Value:
    if slope.rank == 1 and x.rank > 1:  # one slope for each channel, which is axis 1
        slope = ctx.reshape(slope, (-1, *[1] * (x.rank - 2)))
    return ctx.b.prelu(x, slope)


@maps("glu.default")
def glu(ctx: Context, x: Value, dim: int = -1) -> Value:
    axis = normalize_axis(dim, x.rank)
    half = x.shape[axis] // 2
    left, right = ctx.b.split(x, axis=axis, sizes=(half, half))
    return ctx.b.mul(left, ctx.b.sigmoid(right))


def _along(ctx: Context, op: str, x: Value, dim: int) -> Value:
    if not x.rank:
        return ctx.reshape(ctx.b.op(op, ctx.reshape(x, (1,)), axis=0), ())
    return ctx.b.op(op, x, axis=normalize_axis(dim, x.rank))


def _softmax(op: str) -> Any:
    def mapping(ctx: Context, x: Value, dim: int, *_: Any, **__: Any) -> Value:
        return _along(ctx, op, ctx.operand(x), dim)

    return mapping


maps("softmax.int", "_softmax.default")(_softmax("softmax"))
maps("log_softmax.int", "_log_softmax.default")(_softmax("log_softmax"))


@maps("_safe_softmax.default")
def safe_softmax(ctx: Context, x: Value, dim: int, dtype: DType | None = None) -> Value:
    """Softmax that gives zeros where every element is -inf."""
    x = ctx.operand(x)
    axis = normalize_axis(dim, x.rank)
    hidden = ctx.b.is_inf(ctx.b.reduce_max(x, axes=[axis]), detect_positive=False)
    return ctx.b.where(hidden, 0.0, ctx.b.softmax(x, axis=axis))


maps_table(
    {
        "gelu.default": lambda ctx, x, approximate="none": ctx.b.gelu(x, approximate=approximate),
        "hardsigmoid.default": lambda ctx, x: ctx.b.hard_sigmoid(x, alpha=1 / 6, beta=0.5),
        "relu6.default": lambda ctx, x: hardtanh(ctx, x, 0, 6),
        "leaky_relu.default": lambda ctx, x, slope=0.01: ctx.b.leaky_relu(x, alpha=slope),
        "selu.default": lambda ctx, x: ctx.b.selu(x, **_SELU),
        "celu.default": lambda ctx, x, alpha=1: ctx.b.celu(x, alpha=alpha),
        "log_sigmoid.default": lambda ctx, x: ctx.b.neg(ctx.b.softplus(ctx.b.neg(x))),
        "softshrink.default": lambda ctx, x, lambd=0.5: ctx.b.shrink(x, lambd=lambd, bias=lambd),
        "hardshrink.default": lambda ctx, x, lambd=0.5: ctx.b.shrink(x, lambd=lambd, bias=0.0),
    }
)
