"""Normalizations of a row as reduction passes, independent of the loop structure.

Each pass reduces the row to one number, which later passes and the output may use:

    layer_norm   mean = Σ v / n; spread = 1 / √(Σ (v - mean)² / n + eps); y = (v - mean) · spread
    rms_norm     spread = 1 / √(Σ v² / n + eps);                          y = v · spread
    softmax      top = max v; v := e^(v - top); share = 1 / Σ v;          y = v · share
    log_softmax  top = max v; rest = ln Σ e^(v - top);                    y = v - top - rest
    lp_norm      norm = (Σ |v|^p)^(1/p);                                  y = v / norm, or 0
    dynamic_quantize                                                      y = v

`kernels.rows.rows` loops along contiguous rows, `kernels.rows.columns` along an inner axis for many
columns at once, where each statistic is a vector.

Float sums depend on their order. Along rows, layer_norm and rms_norm use the `Order` of ONNX
Runtime: a norm is often followed by 8-bit quantization, where a different last bit can change the
quantized value, so every machine must compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Function, Operand, Value
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive

Stats = Sequence[Value]


@dataclass(frozen=True)
class Order:
    """A reduction order that does not depend on the vector width.

    Column c is accumulated into total c mod `totals`; then the totals are combined by halving, the
    first half with the second, until one is left.
    """

    totals: int
    wide: bool = False
    """Whether totals are f64 regardless of the computed type."""
    rest_last: bool = False
    """Whether the remaining columns after the last whole group of `totals` are accumulated one by
    one into the combined total: the first four, if present, by `Pass.accumulate_unfused`."""


@dataclass(frozen=True)
class Pass:
    start: float
    accumulate: Callable[[Function, Value, Value, Stats], Value]
    """(f, total, v, results of earlier passes) -> new total."""
    combine: Callable[[Function, Value, Value], Value]
    """Combines two totals."""
    finish: Callable[[Function, Value, Value], Value]
    """(f, total, n) -> the pass's result."""
    replace: Callable[[Function, Value, Stats], Value] | None = None
    """Replaces v in this pass and everything after it."""
    order: Order | None = None
    """The order along contiguous rows; None allows any."""
    accumulate_unfused: Callable[[Function, Value, Value, Stats], Value] | None = None
    """As `accumulate`, without fma."""


@dataclass(frozen=True)
class Formula:
    passes: tuple[Pass, ...]
    output: Callable[[Function, Value, Stats], Value]

    @property
    def replaces(self) -> bool:
        return any(step.replace is not None for step in self.passes)

    @property
    def is_ordered(self) -> bool:
        return any(step.order is not None for step in self.passes)


def _add(f: Function, a: Value, b: Value) -> Value:
    return f.add(a, b)


def _keep(f: Function, total: Value, count: Value) -> Value:
    return total


def _mean(f: Function, total: Value, count: Value) -> Value:
    return f.div(total, count)


def _inverse_root(eps: float) -> Callable[[Function, Value, Value], Value]:
    def finish(f: Function, total: Value, count: Value) -> Value:
        return f.div(1.0, f.sqrt(f.add(f.div(total, count), eps)))

    return finish


_SUM = Order(32, wide=True)
_SQUARES = Order(8, rest_last=True)


def _squares(of: Callable[[Function, Value, Stats], Value], eps: float) -> Pass:
    """1 / √(mean of squares + eps)."""

    def fold(f: Function, total: Value, v: Value, stats: Stats) -> Value:
        x = of(f, v, stats)
        return f.fma(x, x, total)

    def accumulate_unfused(f: Function, total: Value, v: Value, stats: Stats) -> Value:
        x = of(f, v, stats)
        return f.add(total, f.mul(x, x))

    return Pass(
        0.0, fold, _add, _inverse_root(eps), order=_SQUARES, accumulate_unfused=accumulate_unfused
    )


def layer_norm(eps: float) -> Formula:
    mean = Pass(0.0, lambda f, total, v, stats: f.add(total, v), _add, _mean, order=_SUM)
    return Formula(
        (mean, _squares(lambda f, v, stats: f.sub(v, stats[0]), eps)),
        lambda f, v, stats: f.mul(f.sub(v, stats[0]), stats[1]),
    )


def rms_norm(eps: float) -> Formula:
    squares = _squares(lambda f, v, stats: v, eps)
    return Formula((squares,), lambda f, v, stats: f.mul(v, stats[0]))


# The maximum does not propagate NaN, but e^(v - top) and the sum do.
_TOP = Pass(-math.inf, lambda f, total, v, stats: f.quick_max(v, total), Function.quick_max, _keep)


def _power(f: Function, v: Value, stats: Stats) -> Value:
    return exp_nonpositive(f, f.sub(v, stats[0]))


def softmax() -> Formula:
    share = Pass(
        0.0,
        lambda f, total, v, stats: f.add(total, v),
        _add,
        lambda f, total, count: f.div(1.0, total),
        replace=_power,
    )
    return Formula((_TOP, share), lambda f, v, stats: f.mul(v, stats[1]))


def log_softmax() -> Formula:
    rest = Pass(
        0.0,
        lambda f, total, v, stats: f.add(total, _power(f, v, stats)),
        _add,
        lambda f, total, count: vector_math.log(f, total),
    )
    return Formula((_TOP, rest), lambda f, v, stats: f.sub(f.sub(v, stats[0]), stats[1]))


def _to_power(f: Function, v: Value, p: Operand) -> Value:
    return vector_math.pow_(f, v, f.as_value(p, v.type))


def lp_norm(p: int) -> Formula:
    def fold(f: Function, total: Value, v: Value, stats: Stats) -> Value:
        if p == 2:
            return f.fma(v, v, total)
        size = f.abs(v)
        return f.add(total, size if p == 1 else _to_power(f, size, float(p)))

    def finish(f: Function, total: Value, count: Value) -> Value:
        if p <= 2:
            return f.sqrt(total) if p == 2 else total
        return _to_power(f, total, 1.0 / p)

    def output(f: Function, v: Value, stats: Stats) -> Value:
        norm = f.as_value(stats[0], v.type)
        return f.select(f.eq(norm, 0.0), 0.0, f.div(v, norm))

    return Formula((Pass(0.0, fold, _add, finish),), output)


def formula(op: str, attr: float) -> Formula:
    """The formula of an op; `attr` is its eps or p, if it has one."""
    if op == "layer_norm":
        return layer_norm(attr)
    if op == "rms_norm":
        return rms_norm(attr)
    if op == "lp_norm":
        return lp_norm(int(attr))
    if op == "dynamic_quantize":
        return Formula((), lambda f, v, stats: v)
    return softmax() if op == "softmax" else log_softmax()
