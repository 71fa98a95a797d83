"""Normalizations: the ONNX op if the opset has it, else the decomposition that runtimes fuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.export.onnx.forms import in_f32, reduce, reshape
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.ir.dim import product
from bitwright.ir.dtype import f32
from bitwright.ir.types import normalize_axis


def standardize(e: Scope, x: Ref, axes: Sequence[int], eps: float) -> Ref:
    """(x - mean) / sqrt(var + eps) over axes."""
    centred = e.Sub(x, reduce(e, "ReduceMean", x, axes))
    variance = reduce(e, "ReduceMean", e.Pow(centred, e.scalar(2, x)), axes)
    return e.Div(centred, e.Sqrt(e.Add(variance, e.scalar(eps, x))))


def _affine(e: Scope, x: Ref, scale: Ref | None, bias: Ref | None) -> Ref:
    if scale is not None:
        x = e.Mul(x, scale)
    return x if bias is None else e.Add(x, bias)


def _covers(parameter: Ref | None, x: Ref, at: int) -> bool:
    return parameter is None or parameter.shape == x.shape[at:]


def _ones(e: Scope, x: Ref, at: int) -> Ref | None:
    """A scale of ones for an f32 norm without a scale, if sizes are known: runtimes have kernels
    for norms with a scale, and run others node by node, which is slower and rounds differently."""
    sizes = x.shape[at:]
    is_known = x.dtype == f32 and all(isinstance(size, int) for size in sizes)
    return e.constant(np.ones(sizes, np.float32), f32) if is_known else None


@exports("layer_norm")
def layer_norm(e: Scope, x: Ref, scale: Ref | None, bias: Ref | None, axis: int, eps: float) -> Ref:
    at = normalize_axis(axis, x.rank)
    if scale is None and e.fits("LayerNormalization", [x, x, bias]):
        scale = _ones(e, x, at)
    is_whole = scale is not None and _covers(scale, x, at) and _covers(bias, x, at)
    if is_whole and e.fits("LayerNormalization", [x, scale, bias]):
        return e.LayerNormalization(x, scale, bias, axis=axis, epsilon=eps)
    axes = range(at - x.rank, 0)
    return _affine(e, in_f32(e, x, lambda x: standardize(e, x, axes, eps)), scale, bias)


@exports("rms_norm")
def rms_norm(e: Scope, x: Ref, scale: Ref | None, bias: Ref | None, axis: int, eps: float) -> Ref:
    at = normalize_axis(axis, x.rank)
    scale = _ones(e, x, at) if scale is None else scale
    if scale is not None and _covers(scale, x, at) and e.fits("RMSNormalization", [x, scale]):
        return _affine(e, e.RMSNormalization(x, scale, axis=axis, epsilon=eps), None, bias)
    axes = range(at - x.rank, 0)

    def divide(x: Ref) -> Ref:
        square = reduce(e, "ReduceMean", e.Pow(x, e.scalar(2, x)), axes)
        return e.Div(x, e.Sqrt(e.Add(square, e.scalar(eps, x))))

    return _affine(e, in_f32(e, x, divide), scale, bias)


# per channel


def per_channel(e: Scope, parameter: Ref, rank: int) -> Ref:
    """[C] as [C, 1, …], which broadcasts over [N, C, …]."""
    return e.Reshape(parameter, e.ints([-1, *[1] * (rank - 2)])) if rank > 2 else parameter


def _channels(
    e: Scope, parameter: Ref | None, count: object, value: float, like: Ref
) -> Ref | None:
    """The parameter, or `value` per channel if it is absent; None if their number is symbolic."""
    if parameter is not None or not isinstance(count, int):
        return parameter
    return e.constant(np.full(count, value), like.element)


def _affine_channels(e: Scope, x: Ref, rank: int, scale: Ref | None, bias: Ref | None) -> Ref:
    scale = None if scale is None else per_channel(e, scale, rank)
    return _affine(e, x, scale, None if bias is None else per_channel(e, bias, rank))


@exports("instance_norm")
def instance_norm(e: Scope, x: Ref, scale: Ref | None, bias: Ref | None, eps: float) -> Ref:
    factor = _channels(e, scale, x.shape[1], 1, x)
    offset = _channels(e, bias, x.shape[1], 0, x)
    if factor is not None and offset is not None:
        return e.InstanceNormalization(x, factor, offset, epsilon=eps)
    axes = range(2, x.rank)
    y = in_f32(e, x, lambda x: standardize(e, x, axes, eps))
    return _affine_channels(e, y, x.rank, scale, bias)


@exports("group_norm")
def group_norm(
    e: Scope, x: Ref, scale: Ref | None, bias: Ref | None, groups: int, eps: float
) -> Ref:
    """GroupNormalization; before opset 21 an instance norm of [N, groups, …]."""
    factor = _channels(e, scale, x.shape[1], 1, x)
    offset = _channels(e, bias, x.shape[1], 0, x)
    if e.opset >= 21 and x.rank > 2 and factor is not None and offset is not None:
        return e.GroupNormalization(x, factor, offset, num_groups=groups, epsilon=eps)

    spatial = product(list(x.shape[2:]))
    target = (x.shape[0], groups, x.shape[1] * spatial // groups)

    def normalize(y: Ref) -> Ref:
        grouped = reshape(e, y, x.shape, target)
        ones, zeros = (_channels(e, None, groups, value, y) for value in (1, 0))
        return e.InstanceNormalization(grouped, ones, zeros, epsilon=eps)

    y = e.Reshape(in_f32(e, x, normalize), e.Shape(x))
    return _affine_channels(e, y, x.rank, scale, bias)


@exports("batch_norm")
def batch_norm(e: Scope, x: Ref, scale: Ref, bias: Ref, mean: Ref, var: Ref, eps: float) -> Ref:
    if mean.dtype != var.dtype or scale.dtype != bias.dtype:
        raise e.reject("BatchNormalization takes statistics of one element type")
    return e.BatchNormalization(x, scale, bias, mean, var, epsilon=eps)


@exports("lrn")
def lrn(e: Scope, x: Ref, size: int, alpha: float, beta: float, bias: float) -> Ref:
    """LRN for images and odd sizes, which runtimes support; else an average of squares."""
    if x.rank == 4 and size % 2:
        return e.LRN(x, size=size, alpha=alpha, beta=beta, bias=bias)
    plane = (x.shape[0], 1, x.shape[1], product(list(x.shape[2:])))
    squares = reshape(e, e.Mul(x, x), x.shape, plane)
    pads = [(size - 1) // 2, 0, size // 2, 0]
    padded = e.Pad(squares, e.ints([0, 0, pads[0], 0, 0, 0, pads[2], 0]), e.scalar(0, x))
    mean = e.AveragePool(padded, kernel_shape=[size, 1])
    around = e.Mul(e.Reshape(mean, e.Shape(x)), e.scalar(alpha, x))
    return e.Div(x, e.Pow(e.Add(around, e.scalar(bias, x)), e.scalar(beta, x)))


@exports("lp_norm")
def lp_norm(e: Scope, x: Ref, axis: int, p: int) -> Ref:
    """A decomposition: before opset 22 LpNormalization is undefined for norm 0."""
    if p == 1:
        norm = reduce(e, "ReduceL1", x, [axis])
    elif p == 2:
        norm = reduce(e, "ReduceL2", x, [axis])
    else:
        total = reduce(e, "ReduceSum", e.Pow(e.Abs(x), e.scalar(p, x)), [axis])
        norm = e.Pow(total, e.scalar(1 / p, x))
    zero = e.scalar(0, x)
    return e.Where(e.Equal(norm, zero), zero, e.Div(x, norm))
