"""Activation functions that exporters write out in primitive ops.

Each table lists the ways to write one formula; the rules are their combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.ir.dtype import i32
from bitwright.ops.nn.activation import TANH_GELU_CUBIC, TANH_GELU_LINEAR
from bitwright.rewrite import Match, Rule
from bitwright.rewrite.producers import comes_from

Form = Callable[[Any, Any], Any]

# 1 + erf(x / sqrt 2)
_ERF_FORMS: dict[str, Form] = {
    "div": lambda op, x: op.add(op.erf(op.div(x, 2**0.5)), 1),
    "mul": lambda op, x: op.add(op.erf(op.mul(x, 0.5**0.5)), 1),
}
# x + 0.044715 x^3
_CUBIC_FORMS: dict[str, Form] = {
    "pow": lambda op, x: op.add(x, op.mul(op.pow(x, 3), 0.044715)),
    "cube": lambda op, x: op.add(x, op.mul(op.mul(op.mul(x, x), x), 0.044715)),
    "scaled-cube": lambda op, x: op.add(x, op.mul(op.mul(op.mul(x, x), 0.044715), x)),
    "scaled-factor": lambda op, x: op.add(x, op.mul(op.mul(op.mul(x, 0.044715), x), x)),
    "factored": lambda op, x: op.mul(x, op.add(op.mul(op.mul(x, x), 0.044715), 1)),
    "factored-left": lambda op, x: op.mul(x, op.add(op.mul(op.mul(x, 0.044715), x), 1)),
}


def _tanh_form(cubic: Form) -> Form:
    """1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))"""
    return lambda op, x: op.add(op.tanh(op.mul(cubic(op, x), 0.7978845608028654)), 1)


_TANH_FORMS: dict[str, Form] = {name: _tanh_form(cubic) for name, cubic in _CUBIC_FORMS.items()}
_TANH_FORMS["expanded"] = lambda op, x: op.add(
    op.tanh(op.mul(op.mul(x, 0.7978845608028654), op.add(op.mul(op.mul(x, x), 0.044715), 1))), 1
)
# 0.5 x g
_HALVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "half-gate": lambda op, x, g: op.mul(x, op.mul(g, 0.5)),
    "half-x": lambda op, x, g: op.mul(op.mul(x, 0.5), g),
    "half-product": lambda op, x, g: op.mul(op.mul(x, g), 0.5),
}


def _gelu_rules(forms: dict[str, Form], approximate: str) -> list[Rule]:
    return [
        Rule(
            f"gelu-{approximate}-from-{form}-{half}",
            lambda op, x, gate=gate, product=product: product(op, x, gate(op, x)),
            lambda op, x: op.gelu(x, approximate=approximate),
        )
        for form, gate in forms.items()
        for half, product in _HALVES.items()
    ]


def _why_not_quick_gelu(m: Match) -> str | bool:
    return m.scalar("a") is None and "its slope is not a constant"


def _why_not_hard_swish(m: Match) -> str | bool:
    """Behind an integer product the next layer is quantized dynamically, and a different last bit
    could change all its values: keep the rounding of the original formula."""
    is_product = lambda node: node.op in ("conv", "matmul") and node.outputs[0].dtype == i32
    is_integer = comes_from(m.x, is_product)
    return is_integer and "the next layer's quantized values depend on the rounding of each op"


def _exp_plus_1(op: Any, x: Any) -> Any:
    return op.add(op.exp(x), 1)


def _rule(name: str, result: str, match: Form) -> Rule:
    return Rule(name, match, lambda op, x: op.op(result, x))


RULES = [
    *_gelu_rules(_ERF_FORMS, "none"),
    *_gelu_rules(_TANH_FORMS, "tanh"),
    _rule("silu", "silu", lambda op, x: op.mul(x, op.sigmoid(x))),
    Rule(
        "quick-gelu",
        lambda op, x, a: op.mul(x, op.sigmoid(op.mul(x, a))),
        lambda op, x, m: op.quick_gelu(x, alpha=m.scalar("a")),
        _why_not_quick_gelu,
    ),
    Rule(
        "quick-gelu-from-exp",
        lambda op, x, a: op.div(x, _exp_plus_1(op, op.mul(x, a))),
        lambda op, x, m: op.quick_gelu(x, alpha=-m.scalar("a")),
        _why_not_quick_gelu,
    ),
    _rule("sigmoid-from-exp", "sigmoid", lambda op, x: op.div(1, _exp_plus_1(op, op.neg(x)))),
    _rule(
        "sigmoid-from-exp-reciprocal",
        "sigmoid",
        lambda op, x: op.reciprocal(_exp_plus_1(op, op.neg(x))),
    ),
    _rule("silu-from-exp", "silu", lambda op, x: op.div(x, _exp_plus_1(op, op.neg(x)))),
    Rule(
        "gelu-tanh-from-exp",
        lambda op, x: op.div(
            x,
            _exp_plus_1(
                op, op.mul(x, op.add(op.mul(op.mul(x, x), TANH_GELU_CUBIC), TANH_GELU_LINEAR))
            ),
        ),
        lambda op, x: op.gelu(x, approximate="tanh"),
    ),
    Rule(
        "hard-swish-divided-last",
        lambda op, x: op.div(op.mul(x, op.clip(op.add(x, 3), 0, 6)), 6),
        lambda op, x: op.hard_swish(x),
        _why_not_hard_swish,
    ),
    Rule(
        "hard-swish-divided-first",
        lambda op, x: op.mul(x, op.div(op.clip(op.add(x, 3), 0, 6), 6)),
        lambda op, x: op.hard_swish(x),
    ),
    Rule(
        "hard-swish-by-factor",
        lambda op, x: op.mul(x, op.mul(op.clip(op.add(x, 3), 0, 6), 1 / 6)),
        lambda op, x: op.hard_swish(x),
    ),
    Rule(
        "hard-swish-from-hard-sigmoid",
        lambda op, x, a, b: op.mul(x, op.hard_sigmoid(x, alpha=a, beta=b)),
        lambda op, x: op.hard_swish(x),
        lambda m: (
            (abs(m.a - 1 / 6) > 1e-6 or abs(m.b - 0.5) > 1e-6) and f"slope {m.a}, shift {m.b}"
        ),
    ),
    Rule(
        "hard-sigmoid-from-clip",
        lambda op, x: op.div(op.clip(op.add(x, 3), 0, 6), 6),
        lambda op, x: op.hard_sigmoid(x, alpha=1 / 6, beta=0.5),
    ),
    _rule("softplus-from-exp", "softplus", lambda op, x: op.log(_exp_plus_1(op, x))),
    _rule("mish", "mish", lambda op, x: op.mul(x, op.tanh(op.softplus(x)))),
]
