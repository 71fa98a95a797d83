"""Gradients of pooling and convolution over images [batch, channels, height, width]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bitwright.nn.compiled import Array, gradients, require

Pair = int | tuple[int, int]


class ConvGradients(NamedTuple):
    """The gradients of a convolution's input, weight and bias."""

    dx: Array
    dw: Array
    db: Array


def max_pool2d_backward(
    x: Any,
    dy: Any,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Array:
    """The gradient of x: each element of dy is added at the largest element of its window.

    The first of equal elements counts, NaN counts as the largest, padding never does.
    """
    attrs = _pooling(x, kernel, stride, padding, dilation, ceil_mode)
    return gradients("max_pool", {"x": x}, dy, ("x",), **attrs)[0]


def avg_pool2d_backward(
    x: Any,
    dy: Any,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """The gradient of x: each element of dy is spread evenly over its window."""
    attrs = _pooling(x, kernel, stride, padding, 1, ceil_mode)
    attrs["count_include_pad"] = count_include_pad
    return gradients("avg_pool", {"x": x}, dy, ("x",), **attrs)[0]


def conv2d_backward(
    x: Any,
    w: Any,
    dy: Any,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ConvGradients:
    """The gradients of y = conv(x, w) + b; w is [outputs, channels / groups, height, width]."""
    _require_image(x)
    shape = np.shape(w)
    require(len(shape) == 4, "w has the wrong rank", expected=4, found=list(shape))
    require(
        groups > 0 and np.shape(x)[1] == groups * shape[1] and shape[0] % groups == 0,
        "the weight does not fit the channels and groups",
        expected=f"{np.shape(x)[1]} channels in {groups} groups",
        found=f"w {list(shape)}",
    )
    operands = {"x": x, "w": w, "b": np.zeros(shape[0], np.asarray(w).dtype)}
    attrs = {
        "strides": _pair("stride", stride, 1),
        "pads": _pair("padding", padding, 0) * 2,
        "dilations": _pair("dilation", dilation, 1),
        "groups": groups,
    }
    return ConvGradients(*gradients("conv", operands, dy, ("x", "w", "b"), **attrs))


def _pooling(
    x: Any, kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil_mode: bool
) -> dict[str, Any]:
    _require_image(x)
    sizes = _pair("kernel", kernel, 1)
    pads = _pair("padding", padding, 0)
    require(
        all(2 * pad <= size for pad, size in zip(pads, sizes, strict=True)),
        "the padding is more than half of the kernel",
        expected=f"at most {[size // 2 for size in sizes]}",
        found=list(pads),
    )
    return {
        "kernel": sizes,
        "strides": sizes if stride is None else _pair("stride", stride, 1),
        "pads": pads * 2,
        "dilations": _pair("dilation", dilation, 1),
        "ceil": ceil_mode,
    }


def _require_image(x: Any) -> None:
    require(
        np.ndim(x) == 4,
        "x has the wrong rank",
        expected="batch, channels, height, width",
        found=list(np.shape(x)),
    )


def _pair(name: str, value: Pair, least: int) -> tuple[int, ...]:
    found = (value, value) if isinstance(value, int) else tuple(value)
    require(
        len(found) == 2 and all(isinstance(n, int) and n >= least for n in found),
        f"{name} is wrong",
        expected=f"one or two numbers from {least}",
        found=value,
    )
    return found
