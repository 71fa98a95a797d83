"""Means of codes are sums of whole numbers: exact, and a quarter of the bytes is read.

    reduce_mean(dequantize(q), axes)   ->  (Σ q - n zero) / n * scale       summed in i32 or i64
    avg_pool(dequantize(q))            ->  integer_conv(q, ones) * (scale / cells), by channel

The second is a product like others: what stands behind it, a step to codes too, is computed where
it stores. A window that is the whole image is a mean of the first kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitwright.ir.dim import Size, bounds, product
from bitwright.ir.dtype import f32, i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.ops.nn.windows import make_windows
from bitwright.passes.lower_integer.operands import LIMIT, QuantizedOperand, match_dequantize
from bitwright.rewrite import Match, Rule

Array = np.ndarray[Any, Any]
MOST_TAPS = 256
"""Cells of a window; kernels sum no more exactly where they have no dot instruction."""


def mean_rules(held: Callable[[Any, Array], Value]) -> list[Rule]:
    """`held` makes a constant of a factor in f64."""
    return [
        Rule("mean-of-codes", lambda op: op.reduce_mean(...), _mean, _no_mean),
        Rule(
            "average-pool-of-codes",
            lambda op: op.avg_pool(...),
            lambda op, m: _pool(op, m.root, held),
            _no_pool,
        ),
    ]


def _source(node: Node) -> QuantizedOperand | str:
    (x,) = node.operands
    found = match_dequantize(x)
    if isinstance(found, str):
        return found
    if found.step is None or (found.zero is not None and found.known_zero is None):
        return f"{x} has a scale of the run"
    return f"{x} is a constant" if found.qvalues.is_constant else found


def _no_mean(m: Match) -> str:
    found = _source(m.root)
    return found if isinstance(found, str) else ""


def _mean(op: Any, m: Match) -> Any:
    (x,) = m.root.operands
    axes = [normalize_axis(axis, x.rank) for axis in m.root.attrs["axes"]]
    return _sum(op, m.root, axes, m.root.attrs["keepdims"])


def _sum(op: Any, node: Node, axes: Sequence[int], keepdims: bool) -> Any:
    """The mean over axes as a sum of codes, its zero points taken off."""
    found = _source(node)
    assert isinstance(found, QuantizedOperand) and found.step is not None
    count: Size = product(found.qvalues.shape[axis] for axis in axes)
    wide = i32 if bounds(count)[1] * found.reach < LIMIT else i64
    total = op.reduce_sum(op.cast(found.qvalues, to=wide), axes=tuple(axes), keepdims=keepdims)
    zero = found.known_zero
    cells = op.sizes(values=(count,), shape=())
    if zero is not None and zero.any():
        point = op.constant(np.array(zero.reshape(-1)[0], wide.numpy))
        total = op.sub(total, op.mul(op.cast(cells, to=wide), point))
    mean = op.div(op.cast(total, to=f32), op.cast(cells, to=f32))
    return op.mul(mean, op.constant(np.float32(found.step)))


def _no_pool(m: Match) -> str:
    node = m.root
    found = _source(node)
    if isinstance(found, str):
        return found
    (x,) = node.operands
    if _is_whole(node):
        return ""
    taps = int(np.prod(node.attrs["kernel"]))
    if x.rank not in (3, 4) or not isinstance(x.shape[1], int) or x.shape[1] < 1:
        return "it is no image with a known number of channels"
    if taps > MOST_TAPS:
        return f"{taps} cells are too many for one window"
    if node.attrs["ceil"]:
        return "its last windows may reach beyond the image"
    is_known = all(isinstance(size, int) for size in x.shape[2:])
    if not _is_even(node) and not is_known:
        return "how many cells a window counts depends on the run"
    return ""


def _is_whole(node: Node) -> bool:
    """Whether there is one window, which is the image."""
    (x,) = node.operands
    pads = node.attrs.get("pads") or ()
    return tuple(node.attrs["kernel"]) == x.shape[2:] and all(pad == 0 for pad in pads)


def _is_even(node: Node) -> bool:
    """Whether all windows count as many cells."""
    pads = node.attrs.get("pads") or ()
    return bool(node.attrs["count_include_pad"]) or all(pad == 0 for pad in pads)


def _cells(node: Node) -> Array:
    """How many cells each window counts."""
    kernel, (x,) = node.attrs["kernel"], node.operands
    if _is_even(node):
        return np.array(float(np.prod(kernel)))
    windows = make_windows(
        len(kernel), kernel, *(node.attrs.get(name) for name in ("strides", "pads", "dilations"))
    )
    inside = np.ones((1, 1, *x.shape[2:]))
    counts = windows.counts(x.shape[2:], False)
    cells: Array = windows.reduce(windows.pad(inside, counts, 0), counts, np.add)
    return np.maximum(cells[0, 0], 1)


def _pool(op: Any, node: Node, held: Callable[[Any, Array], Value]) -> Any:
    if _is_whole(node):
        return _sum(op, node, range(2, node.outputs[0].rank), True)
    found = _source(node)
    assert isinstance(found, QuantizedOperand) and found.step is not None
    channels = found.qvalues.shape[1]
    ones = np.ones((channels, 1, *node.attrs["kernel"]), np.int8)
    attrs = {name: node.attrs.get(name) for name in ("strides", "pads", "dilations")}
    total = op.integer_conv(
        found.qvalues, op.constant(ones), found.zero, None, None, groups=channels, **attrs
    )
    return op.mul(op.cast(total, to=f32), held(op, found.step / _cells(node)))
