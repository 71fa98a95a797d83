"""Gradients of convolutions.

    conv_backward_input    each dy[n, m] adds its multiple of w[m] to its window of dx[n]
    conv_backward_weight   dw[m, c, tap] = sum over n, windows of dy[n, m] * x[n, c, window + tap]

`shape` is the shape of the result, x or w. Both are linear in each operand, so their own gradients
are convolutions and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.channels import require_groups
from bitwright.ops.nn.windows import WINDOW_ATTRS, make_windows

CONV_ATTRS = {"shape": Attr("sizes"), **WINDOW_ATTRS, "groups": Attr("int", 1)}


def _require_conv(
    dy: TensorType,
    x: Sequence[Size],
    w: Sequence[Size],
    groups: int,
    **window: Any,
) -> None:
    """Raise unless dy has the type of a convolution of shapes x and w."""
    expect.floating("dy", dy)
    if dy.rank < 3 or len(x) != dy.rank or len(w) != dy.rank:
        raise InferenceError(
            "operands have different ranks",
            expected="batch, channels and spatial axes",
            found=f"ranks {dy.rank}, {len(x)} and {len(w)}",
        )
    require_groups("x", x[1], groups)
    require_groups("w", w[0], groups)
    expect.size("axis 1 of w, times groups,", w[1] * groups, x[1])
    counts = make_windows(dy.rank - 2, w[2:], **window).counts(x[2:])
    expect.shape("dy", dy, (x[0], w[0], *counts))


def _infer_input(dy: TensorType, w: TensorType, shape: Sequence[Size], **rest: Any) -> TensorType:
    expect.same_dtype(dy, w)
    _require_conv(dy, shape, w.shape, **rest)
    return dy.with_shape(shape)


def _infer_weight(dy: TensorType, x: TensorType, shape: Sequence[Size], **rest: Any) -> TensorType:
    expect.same_dtype(dy, x)
    _require_conv(dy, x.shape, shape, **rest)
    return dy.with_shape(shape)


def _backward_input(dy: Array, w: Array, shape: Sequence[int], groups: int, **window: Any) -> Array:
    windows = make_windows(dy.ndim - 2, w.shape[2:], **window)
    counts = dy.shape[2:]
    taps, pixels = int(np.prod(w.shape[1:])), int(np.prod(counts))
    kernels = wide(w).reshape(groups, len(w) // groups, taps).swapaxes(1, 2)
    result = np.zeros(tuple(shape))
    for image, gradient in enumerate(wide(dy)):
        spread = kernels @ gradient.reshape(groups, len(w) // groups, pixels)
        columns = spread.reshape(shape[1], *w.shape[2:], *counts)
        result[image] = windows.fold(columns, shape[2:])
    return result


def _backward_weight(
    dy: Array, x: Array, shape: Sequence[int], groups: int, **window: Any
) -> Array:
    windows = make_windows(dy.ndim - 2, shape[2:], **window)
    counts = dy.shape[2:]
    columns = windows.columns(windows.pad(wide(x), counts, 0), counts)
    taps, pixels = int(np.prod(shape[1:])), int(np.prod(counts))
    result = np.zeros((groups, shape[0] // groups, taps))
    for image, gradient in enumerate(wide(dy)):
        rows = gradient.reshape(groups, shape[0] // groups, pixels)
        result += rows @ columns[image].reshape(groups, taps, pixels).swapaxes(1, 2)
    return result.reshape(tuple(shape))


def _window(node: Node) -> dict[str, Any]:
    return {name: value for name, value in node.attrs.items() if name != "shape"}


def _grad_input(b: Builder, node: Node, dys: list[Value | None]) -> list[Value | None]:
    dy, w = node.operands
    return [
        b.conv(dys[0], w, **_window(node)),
        b.conv_backward_weight(dy, dys[0], shape=w.shape, **_window(node)),
    ]


def _grad_weight(b: Builder, node: Node, dys: list[Value | None]) -> list[Value | None]:
    dy, x = node.operands
    return [
        b.conv(x, dys[0], **_window(node)),
        b.conv_backward_input(dy, dys[0], shape=x.shape, **_window(node)),
    ]


CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 7, 8), (4, 3, 3, 2), (5, 7), {}),
    (
        (2, 3, 7, 8),
        (4, 3, 3, 2),
        (3, 6),
        {"strides": (2, 1), "pads": (1, 0, 2, 1), "dilations": (2, 3)},
    ),
    ((2, 3, 7, 8), (5, 3, 3, 3), (4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((2, 4, 9), (6, 2, 3), (9,), {"groups": 2, "pads": (1, 1)}),
    ((1, 4, 5, 6), (4, 1, 3, 3), (3, 4), {"groups": 4}),
    ((1, 2, 4, 5, 6), (3, 2, 2, 1, 3), (3, 3, 2), {"strides": (1, 2, 2)}),
    ((0, 2, 5), (3, 2, 3), (3,), {}),
    ((3, 1, 1, 1), (1, 1, 1, 1), (1, 1), {}),
)
"""Shapes of x and w, the windows of each axis, and attributes."""


def _samples(is_input: bool, element: str = "f32", tolerance: float = 1e-5) -> list[Sample]:
    found = []
    for x, w, counts, attrs in CASES:
        dy = draw(x[0], w[0], *counts, dtype=element)
        other, shape = (w, x) if is_input else (x, w)
        other_array = draw(*other, dtype=element, seed=1)
        found.append(sample(dy, other_array, shape=shape, tolerance=tolerance, **attrs))
    return found


OPDEFS = [
    OpDef(
        "conv_backward_input",
        Kind.COMPUTE,
        "dy, w",
        infer=_infer_input,
        reference=_backward_input,
        grad=_grad_input,
        takes_epilogue=True,
        flops=lambda xs, ys, attrs: 2 * xs[0].count * (xs[1].count // xs[1].shape[0]),
        samples=lambda: [*_samples(True), *_samples(True, "bf16", 2e-2)[3:5]],
        attrs=CONV_ATTRS,
        doc="The gradient of conv with respect to x, whose shape is given.",
    ),
    OpDef(
        "conv_backward_weight",
        Kind.COMPUTE,
        "dy, x",
        infer=_infer_weight,
        reference=_backward_weight,
        grad=_grad_weight,
        flops=lambda xs, ys, attrs: 2 * xs[0].count * (ys[0].count // ys[0].shape[0]),
        samples=lambda: [*_samples(False), *_samples(False, "bf16", 2e-2)[3:5]],
        attrs=CONV_ATTRS,
        doc="The gradient of conv with respect to w, whose shape is given.",
    ),
]
