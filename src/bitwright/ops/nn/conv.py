"""Convolution, transposed convolution and col2im.

    conv             y[n, m] = sum over c, taps of w[m, c, tap] * x[n, c, window + tap] + bias[m]
    conv_transpose   each x[n, c] adds its multiple of w[c, m] to its window of y
    col2im           adds columns of windows back to their positions in the image

Channels are split into independent `groups`. The references gather windows into a matrix (im2col)
and multiply a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.math.matmul import product_dtype, product_operands, product_result, require_bias
from bitwright.ops.nn.channels import add_channel_bias, as_channels, require_groups
from bitwright.ops.nn.windows import WINDOW_ATTRS, Windows, make_windows

COLUMN_ELEMENTS = 4_000_000
"""The largest number of elements of one matrix of gathered windows."""


def require_images(x: TensorType, w: TensorType) -> int:
    """The number of spatial axes of images x[N, C, ...] and a kernel w of the same rank."""
    if x.rank < 3:
        raise InferenceError(
            "x has the wrong rank", expected="batch, channels and spatial axes", found=x
        )
    expect.rank("w", w, x.rank)
    return x.rank - 2


def infer_conv(
    x: TensorType, w: TensorType, bias: TensorType | None, groups: int, **window: Any
) -> TensorType:
    rank = require_images(x, w)
    expect.real("x", x)
    element = product_dtype(x, w)
    require_groups("x", x.shape[1], groups)
    require_groups("w", w.shape[0], groups)
    expect.size("axis 1 of w, times groups,", w.shape[1] * groups, x.shape[1])
    require_bias(bias, element, w.shape[0])
    windows = make_windows(rank, w.shape[2:], **window)
    return TensorType(element, (x.shape[0], w.shape[0], *windows.counts(x.shape[2:])))


def convolve(x: Array, w: Array, bias: Array | None, groups: int, **window: Any) -> Array:
    windows = make_windows(x.ndim - 2, w.shape[2:], **window)
    counts: tuple[Any, ...] = windows.counts(x.shape[2:])
    images, kernels = product_operands(x, w, int(np.prod(w.shape[1:])))
    images = windows.pad(images, counts, 0)
    columns = windows.columns(images, counts)
    result = np.zeros((len(x), len(w), *counts), np.result_type(images, kernels))
    for image, rows in row_chunks(columns, windows.rank):
        part = columns[image][(slice(None),) * (1 + windows.rank) + (rows,)]
        result[image][:, rows] = multiply_columns(kernels, part, groups)
    return add_channel_bias(product_result(result, x), bias)


def row_chunks(columns: Array, rank: int) -> Iterator[tuple[int, slice]]:
    """Images and slices of their window rows, each with at most `COLUMN_ELEMENTS` elements."""
    rows = columns.shape[-rank]
    row_elements = max(columns[:1].size // max(rows, 1), 1)
    step = max(COLUMN_ELEMENTS // row_elements, 1)
    for image in range(len(columns)):
        for start in range(0, rows, step):
            yield image, slice(start, start + step)


def multiply_columns(w: Array, columns: Array, groups: int) -> Array:
    """w[M, C/groups, *kernel] times columns[C, *kernel, *counts], as [M, *counts]."""
    counts = columns.shape[w.ndim - 1 :]
    depth = int(np.prod(w.shape[1:]))
    matrix = columns.reshape(groups, depth, int(np.prod(counts)))
    return (w.reshape(groups, len(w) // groups, depth) @ matrix).reshape(len(w), *counts)


def _transposed_sizes(
    windows: Windows, sizes: Sequence[Size], output_padding: Sequence[int] | None
) -> tuple[Any, ...]:
    """(size - 1) * stride + extent + output_padding - begin - end, per axis."""
    extra = (0,) * windows.rank if output_padding is None else tuple(output_padding)
    if len(extra) != windows.rank or any(n < 0 for n in extra):
        raise InferenceError(
            "output_padding does not fit",
            expected=f"{windows.rank} entries of at least 0",
            found=list(extra),
        )
    found = tuple(
        (size - 1) * stride + extent + more - begin - end
        for size, stride, extent, more, begin, end in zip(
            sizes,
            windows.strides,
            windows.extents,
            extra,
            windows.begins,
            windows.ends,
            strict=True,
        )
    )
    if any(isinstance(size, int) and size < 0 for size in found):
        raise InferenceError("pads are larger than the result", found=list(found))
    return found


def _infer_conv_transpose(
    x: TensorType,
    w: TensorType,
    bias: TensorType | None,
    output_padding: Sequence[int] | None,
    groups: int,
    **window: Any,
) -> TensorType:
    rank = require_images(x, w)
    expect.floating("x", x)
    element = expect.same_dtype(x, w)
    require_groups("x", x.shape[1], groups)
    expect.size("axis 0 of w", w.shape[0], x.shape[1])
    channels = w.shape[1] * groups
    require_bias(bias, element, channels)
    windows = make_windows(rank, w.shape[2:], **window)
    sizes = _transposed_sizes(windows, x.shape[2:], output_padding)
    return TensorType(element, (x.shape[0], channels, *sizes))


def _conv_transpose(
    x: Array,
    w: Array,
    bias: Array | None,
    output_padding: Sequence[int] | None,
    groups: int,
    **window: Any,
) -> Array:
    windows = make_windows(x.ndim - 2, w.shape[2:], **window)
    sizes = _transposed_sizes(windows, x.shape[2:], output_padding)
    channels, per_group = len(w), w.shape[1]
    taps, pixels_of_image = (int(np.prod(shape)) for shape in (w.shape[1:], x.shape[2:]))
    kernels = wide(w).reshape(groups, channels // groups, taps).swapaxes(1, 2)
    columns_shape = (groups * per_group, *w.shape[2:], *x.shape[2:])
    result = np.zeros((len(x), groups * per_group, *sizes))
    for image, pixels in enumerate(x):
        spread = kernels @ wide(pixels).reshape(groups, channels // groups, pixels_of_image)
        result[image] = windows.fold(spread.reshape(columns_shape), sizes)
    return add_channel_bias(result, bias)


def _infer_col2im(
    x: TensorType, image_shape: Sequence[Size], block_shape: Sequence[int], **window: Any
) -> TensorType:
    expect.rank("x", x, 3)
    windows = make_windows(len(image_shape), block_shape, **window)
    cells = product(list(block_shape))
    if isinstance(x.shape[1], int) and x.shape[1] % cells:
        raise InferenceError(
            "axis 1 of x does not hold whole blocks", expected=f"a multiple of {cells}", found=x
        )
    expect.size("axis 2 of x", x.shape[2], product(list(windows.counts(image_shape))))
    return x.with_shape((x.shape[0], x.shape[1] // cells, *image_shape))


def _col2im(
    x: Array, image_shape: Sequence[int], block_shape: Sequence[int], **window: Any
) -> Array:
    windows = make_windows(len(image_shape), block_shape, **window)
    counts: tuple[Any, ...] = windows.counts(image_shape)
    channels = x.shape[1] // int(np.prod(block_shape))
    return windows.fold(wide(x).reshape(len(x), channels, *block_shape, *counts), image_shape)


def _grad_conv(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    x, w, *_ = node.operands
    dy = dys[0]
    return [
        b.conv_backward_input(dy, w, shape=x.shape, **node.attrs),
        b.conv_backward_weight(dy, x, shape=w.shape, **node.attrs),
        b.reduce_sum(dy, axes=(0, *range(2, dy.rank)), keepdims=False),
    ][: len(node.inputs)]


def _compose_transpose(
    b: Builder,
    x: Value,
    w: Value,
    bias: Value | None,
    output_padding: Sequence[int] | None,
    groups: int,
    **window: Any,
) -> Value:
    """The input gradient of a convolution whose result is x.

    Output padding of a stride or more lies beyond the last window of that convolution.
    """
    windows = make_windows(x.rank - 2, w.shape[2:], **window)
    sizes = _transposed_sizes(windows, x.shape[2:], output_padding)
    if 0 in x.shape[2:]:  # no window adds anything, and no convolution has this result
        nothing = b.expand(number(b, 0.0, x), shape=(x.shape[0], w.shape[1] * groups, *sizes))
        return nothing if bias is None else cast(Value, b.add(nothing, as_channels(b, bias, x)))
    beyond = [
        extra // stride * stride
        for extra, stride in zip(output_padding or (0,) * len(sizes), windows.strides, strict=True)
    ]
    ends = [end - past for end, past in zip(windows.ends, beyond, strict=True)]
    cut = [-end if isinstance(end, int) and end < 0 else 0 for end in ends]
    pads = (*windows.begins, *(end + more for end, more in zip(ends, cut, strict=True)))
    shape = (x.shape[0], w.shape[1] * groups, *(n - c for n, c in zip(sizes, cut, strict=True)))
    y = b.conv_backward_input(
        x,
        w,
        shape=shape,
        groups=groups,
        strides=windows.strides,
        pads=pads,
        dilations=windows.dilations,
    )
    if any(cut):
        y = b.pad(y, pads=(*(0,) * (x.rank + 2), *cut))
    if bias is not None:
        y = b.add(y, as_channels(b, bias, x))
    return cast(Value, y)


def _compose_col2im(
    b: Builder, x: Value, image_shape: Sequence[Size], block_shape: Sequence[int], **window: Any
) -> Value:
    """The input gradient of a convolution that copies each pixel of a window to a channel."""
    windows = make_windows(len(image_shape), block_shape, **window)
    cells = int(np.prod(list(block_shape)))
    images = x.shape[0] * (x.shape[1] // cells)
    copies = b.constant(np.eye(cells).reshape(cells, 1, *block_shape), x.dtype)
    counts = windows.counts(image_shape)
    y = b.conv_backward_input(
        b.reshape(x, shape=(images, cells, *counts)),
        copies,
        shape=(images, 1, *image_shape),
        **window,
    )
    return cast(Value, b.reshape(y, shape=(x.shape[0], x.shape[1] // cells, *image_shape)))


def _conv_samples() -> list[Sample]:
    x, w = draw(2, 3, 7, 8), draw(4, 3, 3, 2, seed=1)
    return [
        sample(x, w),
        sample(x, w, draw(4, seed=2), strides=(2, 1), pads=(1, 0, 2, 1), dilations=(2, 3)),
        sample(draw(2, 4, 9), draw(6, 2, 3, seed=1), groups=2, pads=(1, 1)),
        sample(draw(1, 4, 5, 6), draw(4, 1, 3, 3, seed=1), groups=4),
        sample(draw(1, 2, 4, 5, 6), draw(3, 2, 2, 1, 3, seed=1), strides=(1, 2, 2)),
        sample(draw(0, 2, 5), draw(3, 2, 3, seed=1)),
        sample(draw(2, 0, 5), draw(3, 0, 3), draw(3, seed=1)),
        sample(draw(1, 2, 5, dtype="bf16"), draw(3, 2, 3, dtype="bf16", seed=1), tolerance=2e-2),
        sample(
            draw(1, 2, 5, 5, dtype="u8", low=0, high=255),
            draw(3, 2, 3, 3, dtype="i8", seed=1, low=-128, high=127),
            draw(3, dtype="i32", seed=2, low=-9, high=9),
        ),
        sample(draw(1, 2, 5, dtype="i32", low=-9, high=9), draw(3, 2, 3, dtype="i32", seed=1)),
    ]


def _conv_transpose_samples() -> list[Sample]:
    x, w = draw(2, 4, 3, 5), draw(4, 2, 3, 2, seed=1)
    return [
        sample(x, w),
        sample(x, w, draw(4, seed=2), strides=(2, 3), pads=(1, 0, 0, 1), groups=2),
        sample(x, w, dilations=(2, 1), strides=(2, 2), output_padding=(1, 1)),
        sample(draw(1, 2, 6), draw(2, 3, 4, seed=1), draw(3, seed=2), strides=(4,)),
        sample(draw(1, 2, 2, 3, 2), draw(2, 1, 2, 2, 2, seed=1), strides=(2, 1, 2)),
        sample(draw(0, 2, 3), draw(2, 3, 2, seed=1)),
        sample(draw(1, 2, 0), draw(2, 3, 2, seed=1), draw(3, seed=2)),
    ]


def _col2im_samples() -> list[Sample]:
    return [
        sample(draw(1, 5, 5), image_shape=(5, 5), block_shape=(1, 5)),
        sample(draw(2, 8, 4), image_shape=(5, 5), block_shape=(2, 2), strides=(3, 3)),
        sample(draw(1, 9, 16), image_shape=(6, 6), block_shape=(3, 3)),
        sample(draw(1, 4, 20), image_shape=(4, 4), block_shape=(2, 2), pads=(1, 0, 1, 1)),
        sample(draw(1, 6, 4), image_shape=(6,), block_shape=(3,), dilations=(1,)),
    ]


OPDEFS = [
    OpDef(
        "conv",
        Kind.COMPUTE,
        "x, w, bias?",
        infer=infer_conv,
        reference=convolve,
        grad=_grad_conv,
        takes_epilogue=True,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * (xs[1].count // xs[1].shape[0]),
        samples=_conv_samples,
        attrs={**WINDOW_ATTRS, "groups": Attr("int", 1)},
        doc="Convolution of x[N, C, ...] with w[M, C/groups, ...]; integers as in matmul.",
    ),
    OpDef(
        "conv_transpose",
        Kind.COMPUTE,
        "x, w, bias?",
        infer=_infer_conv_transpose,
        reference=_conv_transpose,
        grad=composed(_compose_transpose),
        flops=lambda xs, ys, attrs: 2 * xs[0].count * (xs[1].count // xs[1].shape[0]),
        samples=_conv_transpose_samples,
        attrs={**WINDOW_ATTRS, "output_padding": Attr("ints", None), "groups": Attr("int", 1)},
        doc="Transposed convolution of x[N, C, ...] with w[C, M/groups, ...].",
    ),
    OpDef(
        "col2im",
        Kind.REDUCTION,
        "x",
        infer=_infer_col2im,
        reference=_col2im,
        grad=composed(_compose_col2im),
        samples=_col2im_samples,
        attrs={"image_shape": Attr("sizes"), "block_shape": Attr("ints"), **WINDOW_ATTRS},
        doc="Columns x[N, C * block, windows] added back into an image [N, C, *image_shape].",
    ),
]
