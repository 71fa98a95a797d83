"""Gradients of matrix products and attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bitwright.nn.compiled import Array, gradients, require


class AttentionGradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array


def matmul_backward(x: Any, w: Any, dy: Any) -> tuple[Array, Array]:
    """The gradients of x and w of y = x @ w, summed over broadcast axes."""
    require(np.ndim(x) >= 1 and np.ndim(w) >= 1, "a scalar has no matrix product")
    dx, dw = gradients("matmul", {"x": x, "w": w}, dy, ("x", "w"))
    return dx, dw


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    dy: Any,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> AttentionGradients:
    """The gradients of softmax(scale q kᵀ + mask) v; arrays are [batch, heads, rows, features].

    `mask` is boolean (False hides) or added to the scores. `softcap` limits scores smoothly.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(
            np.ndim(array) == 4,
            f"{name} has the wrong rank",
            expected="batch, heads, rows, features",
            found=list(np.shape(array)),
        )
    operands = {"q": q, "k": k, "v": v}
    if mask is not None:
        operands["mask"] = mask
    attrs = {"scale": scale, "causal": causal, "softcap": softcap}
    return AttentionGradients(*gradients("attention", operands, dy, ("q", "k", "v"), **attrs))
