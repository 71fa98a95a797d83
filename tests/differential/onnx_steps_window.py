"""Steps that look through windows: convolutions, transposed ones, pools, norms of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_growing import CHANNELS, Growing, Size, Value


def taps(g: Growing, spatial: int) -> list[int]:
    return [g.pick(1, 1, 2, 2, 3, 3, 4, 5, 7) for _ in range(spatial)]


def reach(
    size: Size, tap: int, stride: int, dilation: int, pads: int, ceil: bool = False
) -> int | None:
    """Windows along one axis; None where that is not known, or none fits."""
    if isinstance(size, str):
        return None
    room = size + pads - dilation * (tap - 1) - 1
    if size == 0 or room < 0:
        return -1
    found = -(-room // stride) + 1 if ceil else room // stride + 1
    return found


def windows(g: Growing, x: Value, kernel: list[int], ceil: bool = False) -> tuple[Any, Any] | None:
    """Attributes of windows over an image, and the sizes of the result."""
    spatial = len(kernel)
    strides = [g.pick(1, 1, 1, 2, 2, 3) for _ in kernel]
    dilations = [g.pick(1, 1, 1, 2, 3) for _ in kernel]
    auto = g.pick("SAME_UPPER", "SAME_LOWER", "VALID") if g.chance(0.1) else None
    pads = [g.pick(0, 0, 1, 2) for _ in range(2 * spatial)]
    if auto is not None:
        dilations = [1] * spatial
        pads = [0] * (2 * spatial)
        # what windows further apart than they are wide do to an image differs from op to op
        strides = [min(s, k) for s, k in zip(strides, kernel, strict=True)]
    pads = [min(p, dilations[i % spatial] * (kernel[i % spatial] - 1)) for i, p in enumerate(pads)]
    sizes: list[Size] = []
    for i, size in enumerate(x.shape[2:]):
        if auto and auto.startswith("SAME"):
            found = None if isinstance(size, str) else -(-size // strides[i]) or -1
        else:
            around = pads[i] + pads[spatial + i]
            found = reach(size, kernel[i], strides[i], dilations[i], around, ceil)
        if found is not None and found < 1:
            return None
        sizes.append(g.unknown() if found is None else found)
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    attrs |= {"auto_pad": auto} if auto else {"pads": pads}
    return attrs, sizes


def grouping(g: Growing, channels: int) -> tuple[int, int, int]:
    """Groups, input channels and filters of each."""
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    groups = g.pick(1, 1, 1, channels or 1, g.pick(*divisors) if divisors else 1)
    each = channels // groups
    filters = 1 if groups == channels and g.chance(0.7) else g.pick(1, 2, 3, 8, 16)
    return groups, each, filters


def conv(g: Growing) -> None:
    spatial = g.pick(1, 1, 2, 2, 2, 2, 3)
    x = g.image(spatial)
    channels = x.shape[1]
    if not isinstance(channels, int) or channels == 0:
        return
    kernel = taps(g, spatial)
    found = windows(g, x, kernel)
    if found is None:
        return
    attrs, sizes = found
    groups, each, filters = grouping(g, channels)
    if groups == 1:
        filters = g.pick(*CHANNELS)
    w = g.weight([groups * filters, each, *kernel], each * int(np.prod(kernel)))
    bias = g.constant(g.array([groups * filters])) if g.chance(0.5) else None
    y = g.make("Conv", [x, w, bias], [x.shape[0], groups * filters, *sizes], group=groups, **attrs)
    follow(g, y)


def follow(g: Growing, y: Value) -> None:
    """What kernels take along as an epilogue."""
    for _ in range(g.integer(0, 2)):
        if g.chance(0.4):
            y = g.make(g.pick("Relu", "Sigmoid", "Tanh", "HardSwish"), [y], y.shape)
        elif g.chance(0.5):
            channels = [y.shape[1] if isinstance(y.shape[1], int) else 1, *[1] * (y.rank - 2)]
            y = g.make(g.pick("Add", "Mul"), [y, g.constant(g.array(channels))], y.shape)
        else:
            same = [v for v in g.values if v.shape == y.shape and v.dtype == y.dtype]
            y = g.make("Add", [y, g.pick(*same)], y.shape)


def conv_transpose(g: Growing) -> None:
    spatial = g.pick(1, 1, 2, 2, 2, 3)
    x = g.image(spatial)
    channels = x.shape[1]
    if not isinstance(channels, int) or channels == 0 or 0 in x.shape[2:]:
        return
    kernel = taps(g, spatial)
    strides = [g.pick(1, 1, 2, 2, 3, 4) for _ in kernel]
    dilations = [g.pick(1, 1, 1, 2) for _ in kernel]
    pads = [g.pick(0, 0, 1, 2) for _ in range(2 * spatial)]
    extra = [g.pick(0, 0, 1, 2) for _ in kernel]
    extra = [min(e, max(s, d) - 1) for e, s, d in zip(extra, strides, dilations, strict=True)]
    sizes: list[Size] = []
    for i, size in enumerate(x.shape[2:]):
        if isinstance(size, str):
            sizes.append(g.unknown())
            continue
        whole = strides[i] * (size - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1
        if whole - pads[i] - pads[spatial + i] < 1:
            pads[i] = pads[spatial + i] = 0
        sizes.append(whole - pads[i] - pads[spatial + i])
    groups, each, filters = grouping(g, channels)
    w = g.weight([channels, filters, *kernel], each * int(np.prod(kernel)))
    bias = g.constant(g.array([groups * filters])) if g.chance(0.5) else None
    if np.prod([s if isinstance(s, int) else 9 for s in sizes]) * filters * groups > 1 << 14:
        return
    y = g.make(
        "ConvTranspose",
        [x, w, bias],
        [x.shape[0], groups * filters, *sizes],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=pads,
        output_padding=extra,
        group=groups,
    )
    follow(g, y)


def pool(g: Growing) -> None:
    spatial = g.pick(1, 1, 2, 2, 2, 3)
    op = g.pick("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool")
    x = g.image(spatial)
    ceil = g.chance(0.3)
    kernel = taps(g, spatial)
    found = windows(g, x, kernel, ceil)
    if found is None:
        return
    attrs, sizes = found
    if ceil:  # how windows that begin behind the image count differs between opsets
        sizes = [g.unknown() for _ in sizes]
        attrs["ceil_mode"] = 1
    if op == "AveragePool":
        attrs["count_include_pad"] = g.pick(0, 1)
    if op == "LpPool":
        attrs["p"] = g.pick(1, 2, 2, 3)
    g.make(op, [x], [*x.shape[:2], *sizes], exact=op == "MaxPool" and x.exact, **attrs)


def global_pool(g: Growing) -> None:
    spatial = g.pick(1, 2, 2, 3)
    x = g.image(spatial)
    if 0 in x.shape[2:]:
        return
    op = g.pick("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
    g.make(op, [x], [*x.shape[:2], *[1] * spatial])


def image_norm(g: Growing) -> None:
    x = g.image(g.pick(1, 2, 2, 3))
    channels = x.shape[1]
    if not isinstance(channels, int) or 0 in x.shape[1:]:
        return
    op = g.pick(
        "BatchNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "LRN",
        "LpNormalization",
    )
    scale, bias = (g.constant(g.array([channels])) for _ in range(2))
    if op == "BatchNormalization":
        mean = g.constant(g.array([channels]))
        var = g.constant(np.abs(g.array([channels])) + np.float32(0.1))
        g.make(op, [x, scale, bias, mean, var], x.shape, epsilon=0.01)
    elif op == "LRN":
        g.make(op, [x], x.shape, size=g.pick(1, 2, 3, 5), alpha=0.1, beta=0.75, bias=1.0)
    elif op == "LpNormalization":
        shifted = g.make("Add", [x, g.constant(np.float32(2))], x.shape)
        g.make(op, [shifted], x.shape, axis=g.integer(-x.rank, x.rank - 1), p=g.pick(1, 2))
    elif op == "GroupNormalization":
        groups = g.pick(*[d for d in range(1, channels + 1) if channels % d == 0])
        g.make(op, [x, scale, bias], x.shape, epsilon=0.1, num_groups=groups)
    else:
        g.make(op, [x, scale, bias], x.shape, epsilon=0.1)


def resize(g: Growing) -> None:
    spatial = g.pick(1, 2, 2, 3)
    x = g.image(spatial)
    if 0 in x.shape[1:]:
        return
    mode = g.pick("nearest", "nearest", "linear", "cubic")
    if mode == "cubic" and spatial != 2:
        mode = "linear"
    attrs: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": g.pick(
            "half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"
        ),
    }
    if mode == "nearest":
        attrs["nearest_mode"] = g.pick("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    if mode == "cubic":
        attrs["cubic_coeff_a"] = g.pick(-0.75, -0.5)
        attrs["exclude_outside"] = g.pick(0, 1)
    fixed = all(isinstance(size, int) for size in x.shape)
    if fixed and g.chance(0.4):
        wanted = [*x.shape[:2], *(g.pick(1, 2, 3, 5, 8, 11) for _ in range(spatial))]
        if mode == "nearest":
            # ONNX Runtime divides by the scale as f32: where that is not exact, a place between two
            # pixels may fall to the other side
            wanted[2:] = [g.pick(s, 2 * s, 4 * s, s // 2 if s % 2 == 0 else s) for s in x.shape[2:]]
        g.make("Resize", [x, None, None, g.numbers(wanted)], wanted, **attrs)  # type: ignore[arg-type]
        return
    # scales that lead to whole sizes: where they do not, ONNX Runtime lays the places out for the
    # size that was cut off, ONNX's own definition for the one that was not
    scales, sizes = [1.0, 1.0], list(x.shape[:2])
    for size in x.shape[2:]:
        whole = [s for s in (0.5, 1.5) if isinstance(size, int) and (size * s).is_integer()]
        scales.append(g.pick(1.0, 2.0, 2.0, 3.0, *whole))
        sizes.append(g.unknown() if isinstance(size, str) else int(size * scales[-1]))
    held = g.decisive(np.array(scales, np.float32), is_real=False)
    g.make("Resize", [x, None, held], sizes, **attrs)


STEPS = [
    *[conv] * 5,
    *[conv_transpose] * 4,
    *[pool] * 3,
    global_pool,
    *[image_norm] * 2,
    *[resize] * 2,
]
