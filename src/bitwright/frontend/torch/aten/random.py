"""Random numbers and dropout. Without a seed they differ in every run."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, Shape, maps, maps_table
from bitwright.ir.dtype import DType, bool_, f32, f64, i64
from bitwright.ir.graph import Value


def _draw(ctx: Context, op: str, shape: Shape, **attrs: Any) -> Value:
    """Random numbers in the element type of the result."""
    if ctx.usable(shape):
        return ctx.b.op(op, shape=tuple(shape), dtype=ctx.element, **attrs)
    return ctx.b.op(op, ctx.full(0, shape, ctx.element), **attrs)


def _register(name: str, op: str) -> None:
    def of_shape(ctx: Context, shape: Shape, dtype: DType | None = None) -> Value:
        return _draw(ctx, op, shape)

    def like(ctx: Context, x: Value, dtype: DType | None = None) -> Value:
        return _draw(ctx, op, x.shape)

    maps(f"{name}.default")(of_shape)
    maps(f"{name}_like.default")(like)


_register("rand", "random_uniform")
_register("randn", "random_normal")


@maps("uniform.default")
def uniform(ctx: Context, x: Value, low: float = 0.0, high: float = 1.0) -> Value:
    return _draw(ctx, "random_uniform", x.shape, low=low, high=high)


@maps("normal_functional.default")
def normal(ctx: Context, x: Value, mean: float = 0.0, deviation: float = 1.0) -> Value:
    return _draw(ctx, "random_normal", x.shape, mean=mean, scale=deviation)


def _integers(ctx: Context, shape: Shape, low: int, high: int) -> Value:
    """Random integers from low to high - 1, drawn in f64 for a uniform distribution."""
    if ctx.usable(shape):
        attrs = {"low": float(low), "high": float(high), "dtype": f64}
        random = ctx.b.random_uniform(shape=tuple(shape), **attrs)
    else:
        like = ctx.full(0, shape, f64)
        random = ctx.b.random_uniform(like, low=float(low), high=float(high))
    return ctx.operand(ctx.b.floor(random))


@maps("randint.low")
def randint_from(
    ctx: Context, low: Any, high: Any, shape: Shape, dtype: DType | None = None
) -> Value:
    return _integers(ctx, shape, *ctx.static([low, high], "the range of random numbers"))


@maps("randint_like.default")
def randint_like(ctx: Context, x: Value, high: Any, dtype: DType | None = None) -> Value:
    return randint_from(ctx, 0, high, x.shape)


def _kept(ctx: Context, x: Value, chance: float) -> Value:
    """True with this probability, for each element of x."""
    return ctx.b.lt(ctx.b.random_uniform(x, dtype=f32), float(chance))


def drop(ctx: Context, x: Value, p: float, train: bool) -> tuple[Value, Value | None]:
    """Dropout with probability p, and its key, or None if nothing is dropped.

    A trainer replaces the key by one that depends on its seed and on the step.
    """
    if not train or not p:
        return x, None
    number = ctx.b.random_uniform(shape=(), low=0.0, high=2.0**53, dtype=f64)
    key = ctx.b.cast(number, to=i64)
    return ctx.b.dropout(x, key, rate=float(p)), key


@maps("native_dropout.default")
def native_dropout(ctx: Context, x: Value, p: float, train: bool | None) -> list[Value]:
    y, key = drop(ctx, x, p, train is None or train)
    ones = ctx.full(1, x.shape, x.dtype)
    mask = ones if key is None else ctx.b.dropout(ones, key, rate=float(p))
    return [y, ctx.cast(mask, bool_)]


maps_table(
    {
        "randint.default": lambda ctx, high, shape, dtype=None: randint_from(ctx, 0, high, shape),
        "bernoulli.default": lambda ctx, x: ctx.b.bernoulli(x),
        "bernoulli.p": lambda ctx, x, p=0.5: ctx.cast(_kept(ctx, x, 1 - p), x.dtype),
        "dropout.default": lambda ctx, x, p, train: drop(ctx, x, p, train)[0],
    }
)
