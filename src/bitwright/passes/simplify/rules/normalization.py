"""Softmax, layer norm and RMS norm written in reductions and arithmetic.

softmax      exp(x - max x) / sum exp(x - max x)
layer norm   d / sqrt(mean d^2 + eps) * scale + bias,  d = x - mean x
RMS norm     x / sqrt(mean x^2 + eps) * scale
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.rewrite import Match, Rule

# v / sqrt(mean v^2 + e): the ways to write the quotient
_QUOTIENTS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda op, v, e, a: op.mul(
        v, op.rsqrt(op.add(op.reduce_mean(op.mul(v, v), axes=a, keepdims=True), e))
    ),
    "sqrt": lambda op, v, e, a: op.div(
        v, op.sqrt(op.add(op.reduce_mean(op.mul(v, v), axes=a, keepdims=True), e))
    ),
}


def _trailing(axes: Any, rank: int) -> int | None:
    """The first of the axes if they are the last axes of a tensor, or None."""
    ordered = sorted(axis % rank for axis in axes)
    return ordered[0] if ordered == list(range(rank - len(ordered), rank)) else None


def _why_not_norm(m: Match) -> str | bool:
    if m.scalar("e") is None:
        return "epsilon is not a single constant"
    return _trailing(m.a, m.x.rank) is None and f"axes {list(m.a)} are not the last ones"


def _norm(op_name: str) -> Callable[..., Any]:
    def replace(op: Any, x: Any, m: Match) -> Any:
        axis = _trailing(m.a, x.rank)
        assert axis is not None
        return op.op(op_name, x, axis=axis - x.rank, eps=m.scalar("e"))

    return replace


def _shape_of_norm(m: Match) -> tuple[Any, ...]:
    """The shape of a norm's scale and bias."""
    x = m.norm.inputs[0]
    return tuple(x.shape[m.norm.attrs["axis"] % x.rank :])


def _why_not_affine(name: str) -> Callable[[Match], str | bool]:
    def unless(m: Match) -> str | bool:
        if m.uses(m.norm.outputs[0]) != 1:
            return "the normalized value has another reader"
        found, wanted = tuple(m.bindings[name].shape), _shape_of_norm(m)
        return found != wanted and f"shape {list(found)} is not {list(wanted)}"

    return unless


def _with_bias(op: Any, x: Any, g: Any, c: Any, m: Match) -> Any:
    return op.like(m.norm, x, g, c)


RULES = [
    Rule(
        "softmax-from-exp",
        lambda op, x, a: op.div(
            op.exp(op.sub(x, op.reduce_max(x, axes=a, keepdims=True))),
            op.reduce_sum(
                op.exp(op.sub(x, op.reduce_max(x, axes=a, keepdims=True))), axes=a, keepdims=True
            ),
        ),
        lambda op, x, a: op.softmax(x, axis=a[0]),
        lambda m: len(m.a) != 1 and "it is over several axes",
    ),
    Rule(
        "log-softmax-from-log",
        lambda op, x, a: op.log(op.softmax(x, axis=a)),
        lambda op, x, a: op.log_softmax(x, axis=a),
    ),
    *(
        Rule(
            f"layer-norm-from-{name}",
            lambda op, x, e, a, quotient=quotient: quotient(
                op, op.sub(x, op.reduce_mean(x, axes=a, keepdims=True)), e, a
            ),
            _norm("layer_norm"),
            _why_not_norm,
        )
        for name, quotient in _QUOTIENTS.items()
    ),
    *(
        Rule(
            f"rms-norm-from-{name}",
            lambda op, x, e, a, quotient=quotient: quotient(op, x, e, a),
            _norm("rms_norm"),
            _why_not_norm,
        )
        for name, quotient in _QUOTIENTS.items()
    ),
    *(
        Rule(
            f"scale-into-{norm.replace('_', '-')}",
            lambda op, x, g, norm=norm: op.mul(getattr(op, norm)(x, as_="norm"), g),
            lambda op, x, g, m: op.like(m.norm, x, g),
            _why_not_affine("g"),
        )
        for norm in ("layer_norm", "rms_norm")
    ),
    *(
        Rule(
            f"bias-into-{norm.replace('_', '-')}",
            lambda op, x, g, c, norm=norm: op.add(getattr(op, norm)(x, g, as_="norm"), c),
            _with_bias,
            _why_not_affine("c"),
        )
        for norm in ("layer_norm", "rms_norm")
    ),
]
