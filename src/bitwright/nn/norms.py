"""Gradients of norms: x, gamma and dy to dx, dgamma and dbeta."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bitwright.nn.compiled import Array, gradients, require, require_same


class NormGradients(NamedTuple):
    """The gradients of a norm's input, factor and offset."""

    dx: Array
    dgamma: Array
    dbeta: Array


def rms_norm_backward(x: Any, gamma: Any, dy: Any, eps: float = 1e-6) -> NormGradients:
    """The gradients of y = x / sqrt(mean(x²) + eps) * gamma + beta over the last axis.

    dx = r (gamma dy - x r² mean(gamma dy x)), with r = 1 / sqrt(mean(x²) + eps).
    """
    return _over_last_axis("rms_norm", x, gamma, dy, eps)


def layer_norm_backward(x: Any, gamma: Any, dy: Any, eps: float = 1e-5) -> NormGradients:
    """The gradients of y = (x - mean) / sqrt(var + eps) * gamma + beta over the last axis."""
    return _over_last_axis("layer_norm", x, gamma, dy, eps)


def group_norm_backward(
    x: Any, gamma: Any, dy: Any, groups: int, eps: float = 1e-5
) -> NormGradients:
    """The gradients of the norm over groups of channels; x is [batch, channels, ...]."""
    require_same(x=x, dy=dy)
    shape = np.shape(x)
    require(
        len(shape) >= 2, "x has the wrong rank", expected="batch, channels, ...", found=list(shape)
    )
    require(
        groups > 0 and shape[1] % groups == 0,
        "the groups do not divide the channels",
        expected=f"a divisor of {shape[1]}",
        found=groups,
    )
    _require_factor(gamma, shape[1])
    return _gradients("group_norm", x, gamma, dy, groups=groups, eps=eps)


def batch_norm_backward(x: Any, gamma: Any, dy: Any, eps: float = 1e-5) -> NormGradients:
    """The gradients of the norm by the statistics of the batch; x is [batch, channels, ...]."""
    require_same(x=x, dy=dy)
    require(np.ndim(x) >= 2, "x has the wrong rank", expected="batch, channels, ...")
    _require_factor(gamma, np.shape(x)[1])
    return _gradients("batch_norm_train", x, gamma, dy, eps=eps)


def _over_last_axis(op: str, x: Any, gamma: Any, dy: Any, eps: float) -> NormGradients:
    require_same(x=x, dy=dy)
    require(np.ndim(x) >= 1, "x has no axis to normalize")
    _require_factor(gamma, np.shape(x)[-1])
    return _gradients(op, x, gamma, dy, axis=-1, eps=eps)


def _require_factor(gamma: Any, size: int) -> None:
    require(
        np.shape(gamma) == (size,),
        "gamma has the wrong shape",
        expected=f"[{size}]",
        found=list(np.shape(gamma)),
    )


def _gradients(op: str, x: Any, gamma: Any, dy: Any, **attrs: Any) -> NormGradients:
    operands = {"x": x, "gamma": gamma, "beta": np.zeros_like(np.asarray(gamma))}
    return NormGradients(*gradients(op, operands, dy, ("x", "gamma", "beta"), **attrs))
