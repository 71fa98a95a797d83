"""One step of an optimizer for one parameter, as PyTorch computes it.

    g = grad * factor                                   factor: 1 / loss scale, clipping, 1 / n

    sgd     g += decay * p;  m = momentum * m + g
            p -= rate * (g + momentum * m  if nesterov else  m)
    adam    g += decay * p  or  p *= 1 - rate * decay   (decoupled: AdamW)
            m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
            p -= step * m / (sqrt(v) / root + eps)      step = rate / (1 - beta1 ** t),
                                                        root = sqrt(1 - beta2 ** t)
    lion    p *= 1 - rate * decay;  p -= rate * sign(beta1 * m + (1 - beta1) * g)
            m = beta2 * m + (1 - beta2) * g

The results replace the parameter and the moments; where `apply` is false they are unchanged. A
backend writes them in place if they are states. With `require_finite` a gradient that holds NaN or
infinity is an error, unless `apply` is false; a backend may have updated other parameters then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, NonFiniteError
from bitwright.ir.dtype import bool_
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import (
    Array,
    Attr,
    Kind,
    NonDifferentiable,
    OpDef,
    Sample,
    draw,
    sample,
)

_LAST = NonDifferentiable("an optimizer's step is the end of a training step")
Results = tuple[TensorType, ...]


def _infer(
    tensors: list[TensorType | None], apply: TensorType, scalars: dict[str, TensorType]
) -> Results:
    """The types of the parameter and of its moments."""
    p, g, *moments = tensors
    assert p is not None and g is not None
    expect.floating("p", p)
    for what, one in (("grad", g), *((f"moment {n}", m) for n, m in enumerate(moments, 1))):
        if one is not None and one != p:
            raise InferenceError(f"{what} has another type than p", expected=p, found=one)
    for what, one in scalars.items():
        expect.floating(what, one)
        expect.rank(what, one, 0)
    expect.rank("apply", apply, 0)
    expect.dtype("apply", apply, lambda d: d == bool_, "bool")
    return (p, *(m for m in moments if m is not None))


def _infer_sgd(p: Any, grad: Any, rate: Any, factor: Any, apply: Any, m: Any, **_: Any) -> Results:
    return _infer([p, grad, m], apply, {"rate": rate, "factor": factor})


def _infer_adam(
    p: Any,
    grad: Any,
    m: Any,
    v: Any,
    rate: Any,
    step: Any,
    root: Any,
    factor: Any,
    apply: Any,
    **_: Any,
) -> Results:
    scalars = {"rate": rate, "step": step, "root": root, "factor": factor}
    return _infer([p, grad, m, v], apply, scalars)


def _infer_lion(p: Any, grad: Any, m: Any, rate: Any, factor: Any, apply: Any, **_: Any) -> Results:
    return _infer([p, grad, m], apply, {"rate": rate, "factor": factor})


def _gradient(grad: Array, factor: Array, apply: Array, require_finite: bool) -> Array:
    """The scaled gradient in a wide type."""
    if require_finite and apply and not np.isfinite(wide(grad)).all():
        raise NonFiniteError("the gradient is not finite")
    return wide(grad) * wide(factor)


def _chosen(apply: Array, new: list[Array], old: list[Array | None]) -> tuple[Array, ...]:
    return tuple(new) if apply else tuple(wide(array) for array in old if array is not None)


def _sgd(
    p: Array,
    grad: Array,
    rate: Array,
    factor: Array,
    apply: Array,
    m: Array | None,
    momentum: float,
    nesterov: bool,
    decay: float,
    require_finite: bool,
) -> tuple[Array, ...]:
    w = wide(p)
    g = _gradient(grad, factor, apply, require_finite) + decay * w
    moments = []
    if m is not None:
        moments.append(momentum * wide(m) + g)
        g = g + momentum * moments[0] if nesterov else moments[0]
    return _chosen(apply, [w - wide(rate) * g, *moments], [p, m])


def _adam(
    p: Array,
    grad: Array,
    m: Array,
    v: Array,
    rate: Array,
    step: Array,
    root: Array,
    factor: Array,
    apply: Array,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
    require_finite: bool,
) -> tuple[Array, ...]:
    w, g = wide(p), _gradient(grad, factor, apply, require_finite)
    if decoupled:
        w = w * (1 - wide(rate) * decay)
    else:
        g = g + decay * w
    first = wide(m) + (1 - beta1) * (g - wide(m))
    second = beta2 * wide(v) + (1 - beta2) * g * g
    w = w - wide(step) * first / (np.sqrt(second) / wide(root) + eps)
    return _chosen(apply, [w, first, second], [p, m, v])


def _lion(
    p: Array,
    grad: Array,
    m: Array,
    rate: Array,
    factor: Array,
    apply: Array,
    beta1: float,
    beta2: float,
    decay: float,
    require_finite: bool,
) -> tuple[Array, ...]:
    g, before = _gradient(grad, factor, apply, require_finite), wide(m)
    w = wide(p) * (1 - wide(rate) * decay)
    w = w - wide(rate) * np.sign(beta1 * before + (1 - beta1) * g)
    return _chosen(apply, [w, beta2 * before + (1 - beta2) * g], [p, m])


_SHAPES = ((3, 5), (17,), (), (0, 4), (127,))


def _samples(
    moments: int, scalars: list[Any], before: bool, variants: list[dict[str, Any]]
) -> Callable[[], list[Sample]]:
    """Samples of every shape; the moments stand `before` the scalars, or behind `apply`."""

    def made() -> list[Sample]:
        found = []
        for number, shape in enumerate(_SHAPES):
            p, g, m = (draw(*shape, seed=seed) for seed in range(3))
            held = [m, draw(*shape, seed=4, low=0)][:moments]
            attrs = variants[number % len(variants)]
            apply = np.array(number != 1)
            ordered = [*held, *scalars, apply] if before else [*scalars, apply, *held]
            found.append(sample(p, g, *ordered, **attrs))
        return found

    return made


def _op(name: str, inputs: str, doc: str, attrs: dict[str, Attr], **rest: Any) -> OpDef:
    attrs = {**attrs, "require_finite": Attr("bool", False)}
    return OpDef(
        name, Kind.ELEMENTWISE, inputs, grad=_LAST, fixed_types=True, is_foldable=False, doc=doc,
        attrs=attrs, **rest,
    )  # fmt: skip


_RATE, _FACTOR = np.float32(0.1), np.float32(0.5)
_BETA1, _DECAY = Attr("float", 0.9), Attr("float", 0.0)
OPDEFS = [
    _op(
        "sgd_update",
        "p, grad, rate, factor, apply, m?",
        "p and its momentum after one step of stochastic gradient descent.",
        infer=_infer_sgd,
        reference=_sgd,
        samples=lambda: [
            *_samples(0, [_RATE, _FACTOR], False, [{"decay": 0.01}, {"require_finite": True}])(),
            *_samples(
                1, [_RATE, _FACTOR], False, [{"momentum": 0.9, "nesterov": n} for n in (0, 1)]
            )(),
        ],
        attrs={"momentum": _DECAY, "nesterov": Attr("bool", False), "decay": _DECAY},
    ),
    _op(
        "adam_update",
        "p, grad, m, v, rate, step, root, factor, apply",
        "p and its two moments after one step of Adam, or of AdamW (decoupled).",
        infer=_infer_adam,
        reference=_adam,
        samples=_samples(
            2,
            [_RATE, np.float32(0.3), np.float32(0.2), _FACTOR],
            True,
            [{"decay": 0.01, "decoupled": d, "require_finite": d} for d in (0, 1)],
        ),
        attrs={
            "beta1": _BETA1,
            "beta2": Attr("float", 0.999),
            "eps": Attr("float", 1e-8),
            "decay": _DECAY,
            "decoupled": Attr("bool", False),
        },
    ),
    _op(
        "lion_update",
        "p, grad, m, rate, factor, apply",
        "p and its moment after one step of Lion.",
        infer=_infer_lion,
        reference=_lion,
        samples=_samples(1, [_RATE, _FACTOR], True, [{"decay": 0.01}]),
        attrs={"beta1": _BETA1, "beta2": Attr("float", 0.99), "decay": _DECAY},
    ),
]
