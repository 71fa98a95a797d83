"""Means of quantized values become exact integer sums, which read a quarter of the bytes.

    reduce_mean(dequantize(q), axes)   ->  (Σ q - n zero) / n * scale       summed in i32 or i64
    avg_pool(dequantize(q))            ->  integer_conv(q, ones) * (scale / count), depthwise

The second takes an epilogue like any other product. A pool whose window is the whole image becomes
a mean of the first kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.ir.dim import Size, bounds, product
from bitwright.ir.dtype import f32, i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.ops.nn.windows import make_windows
from bitwright.passes.lower_integer.operands import (
    INT32_LIMIT,
    QuantizedOperand,
    match_static_dequantize,
)
from bitwright.passes.lower_integer.scales import over, scale_constant
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
MAX_TAPS = 256
"""Elements of a window up to which kernels without a dot-product instruction sum exactly."""


def mean_rules() -> list[Rule]:
    return [
        Rule.from_plan("mean-to-integer", any_operands("reduce_mean"), _source, _lower_mean),
        Rule.from_plan(
            "average-pool-to-integer", any_operands("avg_pool"), _plan_pool, _lower_pool
        ),
    ]


def _source(m: Match) -> QuantizedOperand | str:
    return match_static_dequantize(next(m.root.operands))


def _lower_mean(op: Any, m: Match, source: QuantizedOperand) -> Any:
    (x,) = m.root.operands
    axes = [normalize_axis(axis, x.rank) for axis in m.root.attrs["axes"]]
    return _mean(op, source, axes, m.root.attrs["keepdims"])


def _mean(op: Any, source: QuantizedOperand, axes: Sequence[int], keepdims: bool) -> Any:
    """The mean over axes as (Σ q - count * zero) / count * scale."""
    size: Size = product(source.qvalues.shape[axis] for axis in axes)
    wide = i32 if bounds(size)[1] * source.max_distance < INT32_LIMIT else i64
    total = op.reduce_sum(op.cast(source.qvalues, to=wide), axes=tuple(axes), keepdims=keepdims)
    zero = source.constant_zero
    count = op.sizes(values=(size,), shape=())
    point = None
    if isinstance(source.zero, Value) and zero is None:
        point = op.reshape(op.cast(source.zero, to=wide), shape=())
    elif zero is not None and zero.any():
        point = op.constant(np.array(zero.reshape(-1)[0], wide.numpy))
    if point is not None:
        total = op.sub(total, op.mul(op.cast(count, to=wide), point))
    mean = op.div(op.cast(total, to=f32), op.cast(count, to=f32))
    assert source.known_scale is not None
    return op.mul(mean, scale_constant(op, source.known_scale))


def _plan_pool(m: Match) -> QuantizedOperand | str:
    node = m.root
    found = _source(m)
    if isinstance(found, str) or _is_whole(node):
        return found
    (x,) = node.operands
    taps = int(np.prod(node.attrs["kernel"]))
    if x.rank not in (3, 4) or not isinstance(x.shape[1], int) or x.shape[1] < 1:
        return "its input is not 3-d or 4-d with a known number of channels"
    if taps > MAX_TAPS:
        return f"a window of {taps} elements is too large for exact sums"
    if node.attrs["ceil"]:
        return "its last windows may extend beyond the image"
    is_known = all(isinstance(size, int) for size in x.shape[2:])
    if not _is_even(node) and not is_known:
        return "the number of elements per window depends on the image size"
    return found


def _is_whole(node: Node) -> bool:
    """Whether the only window is the whole image."""
    (x,) = node.operands
    pads = node.attrs.get("pads") or ()
    return tuple(node.attrs["kernel"]) == x.shape[2:] and all(pad == 0 for pad in pads)


def _is_even(node: Node) -> bool:
    """Whether all windows count the same number of elements."""
    pads = node.attrs.get("pads") or ()
    return bool(node.attrs["count_include_pad"]) or all(pad == 0 for pad in pads)


def _window_counts(node: Node) -> Array:
    """The number of elements that each window counts."""
    kernel, (x,) = node.attrs["kernel"], node.operands
    if _is_even(node):
        return np.array(float(np.prod(kernel)))
    windows = make_windows(
        len(kernel), kernel, *(node.attrs.get(name) for name in ("strides", "pads", "dilations"))
    )
    inside = np.ones((1, 1, *x.shape[2:]))
    counts = windows.counts(x.shape[2:], False)
    sums: Array = windows.reduce(windows.pad(inside, counts, 0), counts, np.add)
    return np.asarray(np.maximum(sums[0, 0], 1))


def _lower_pool(op: Any, m: Match, source: QuantizedOperand) -> Any:
    node = m.root
    if _is_whole(node):
        return _mean(op, source, range(2, node.outputs[0].rank), True)
    channels = source.qvalues.shape[1]
    ones = np.ones((channels, 1, *node.attrs["kernel"]), np.int8)
    attrs = {name: node.attrs.get(name) for name in ("strides", "pads", "dilations")}
    total = op.integer_conv(
        source.qvalues, op.constant(ones), source.zero, None, None, groups=channels, **attrs
    )
    assert source.known_scale is not None
    scale = over(op, source.known_scale, _window_counts(node))
    return op.mul(op.cast(total, to=f32), scale_constant(op, scale))
