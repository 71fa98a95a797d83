"""Steps of quantized models: Q/DQ pairs around layers, and the integer operators."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_growing import CHANNELS, F32, I8, I32, U8, Growing, Size, Value
from onnx_steps_window import grouping, taps, windows


def scale(g: Growing, size: float = 1.0) -> Value:
    """A scale that fills most of the range, and is no power of two."""
    return g.constant(np.float32(size * g.random.uniform(0.7, 1.5) / 100))


def zero_point(g: Growing, kind: Any, shape: tuple[int, ...] = ()) -> Value:
    if kind == I8 and g.chance(0.5):
        return g.constant(np.zeros(shape, np.int8), structural=True)
    low, high = (-9, 9) if kind == I8 else (100, 150)
    held = g.random.integers(low, high, shape).astype(kind)
    return g.constant(held, structural=True)


def quantized(g: Growing, x: Value, kind: Any = None) -> tuple[Value, Value, Value]:
    """x in 8 bits, its scale and its zero point."""
    kind = g.pick(U8, I8) if kind is None else kind
    s, z = scale(g), zero_point(g, kind)
    return g.make("QuantizeLinear", [x, s, z], x.shape, kind, x.exact), s, z


def pair(g: Growing, x: Value) -> Value:
    q, s, z = quantized(g, x)
    return g.make("DequantizeLinear", [q, s, z], x.shape)


def lone_pair(g: Growing) -> None:
    pair(g, g.operand(ranks=range(1, 5)))


def weight_pair(g: Growing, shape: list[int], fan: int, axis: int) -> Value:
    """A weight in 8 bits behind a DequantizeLinear: one scale, or one for each entry of an axis."""
    kind = g.pick(I8, I8, I8, U8)
    each = (shape[axis],) if g.chance(0.6) else ()
    held = np.abs(g.array(each, 1 / max(1, fan) ** 0.5)) + np.float32(0.01)
    s = g.constant((held / 100).astype(np.float32))
    z = zero_point(g, kind, each) if kind == U8 or g.chance(0.2) else None
    q = g.constant(g.array(shape, dtype=kind))
    return g.make("DequantizeLinear", [q, s, z], shape, axis=axis if each else None)


def bias_of(g: Growing, x: Value, w: Value, count: int) -> Value:
    """A bias of a layer between pairs: in steps of s_x · s_w, as files hold it, or a float that a
    compiler may round to such steps."""
    steps = _scale_of(g, x) * _scale_of(g, w)
    if g.chance(0.5):
        return g.constant(g.array([count]), wobble=steps)
    q = g.constant(g.random.integers(-9999, 9999, [count]).astype(np.int32))
    s = g.constant(np.broadcast_to(steps, [count]).astype(np.float32))
    return g.make("DequantizeLinear", [q, s], [count], axis=0)


def _scale_of(g: Growing, value: Value) -> Any:
    """The scale of a DequantizeLinear's result."""
    node = next(n for n in g.nodes if n.output[0] == value.name)
    return g.constants[node.input[1]]


def end(g: Growing, y: Value) -> None:
    """What stands behind a quantized layer."""
    if g.chance(0.4):
        y = g.make(g.pick("Relu", "Clip"), [y], y.shape)
    if g.chance(0.7):
        pair(g, y)


def pair_conv(g: Growing) -> None:
    spatial = g.pick(1, 2, 2, 2)
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
    fan = each * int(np.prod(kernel))
    w = weight_pair(g, [groups * filters, each, *kernel], fan, 0)
    x = pair(g, x)
    bias = bias_of(g, x, w, groups * filters) if g.chance(0.5) else None
    shape = [x.shape[0], groups * filters, *sizes]
    end(g, g.make("Conv", [x, w, bias], shape, group=groups, **attrs))


def pair_conv_transpose(g: Growing) -> None:
    x = g.image(g.pick(1, 2, 2))
    channels = x.shape[1]
    if not isinstance(channels, int) or channels == 0 or not x.fixed or 0 in x.shape:
        return
    spatial = x.rank - 2
    kernel = taps(g, spatial)
    strides = [g.pick(1, 2, 2, 3) for _ in kernel]
    filters = g.pick(*CHANNELS)
    w = weight_pair(g, [channels, filters, *kernel], channels * int(np.prod(kernel)), 1)
    sizes = [s * (int(n) - 1) + k for s, n, k in zip(strides, x.shape[2:], kernel, strict=True)]
    x = pair(g, x)
    y = g.make("ConvTranspose", [x, w], [x.shape[0], filters, *sizes], strides=strides)
    end(g, y)


def pair_matmul(g: Growing) -> None:
    x = g.operand(ranks=(2, 2, 3, 4))
    depth = x.shape[-1]
    if isinstance(depth, str):
        return
    columns = g.size()
    w = weight_pair(g, [depth, columns], depth, 1)
    x = pair(g, x)
    shape: list[Size] = [*x.shape[:-1], columns]
    if x.rank == 2 and g.chance(0.3):
        bias = bias_of(g, x, w, columns)
        end(g, g.make("Gemm", [x, w, bias], shape))
        return
    y = g.make("MatMul", [x, w], shape)
    if g.chance(0.5):
        y = g.make("Add", [y, bias_of(g, x, w, columns)], shape)
    end(g, y)


def pair_product(g: Growing) -> None:
    """Both sides are made by the run."""
    batch: Size = "n" if g.is_symbolic else g.pick(1, 2)
    rows, depth, columns = (g.pick(1, 1, 2, 3, 7, 17) for _ in range(3))
    front: list[Size] = [batch] + [g.pick(1, 2)] * g.integer(0, 1)
    x, w = pair(g, g.enter([*front, rows, depth])), pair(g, g.enter([*front, depth, columns]))
    end(g, g.make("MatMul", [x, w], [*front, rows, columns]))


def pair_elementwise(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4))
    a = pair(g, x)
    op = g.pick("Add", "Mul", "Sigmoid", "Tanh", "Relu", "Softmax", "LeakyRelu")
    if op in ("Add", "Mul"):
        same = [v for v in g.values if v.shape == x.shape and v.dtype == F32]
        y = g.make(op, [a, pair(g, g.pick(*same))], x.shape)
    elif op == "Softmax" and x.shape[-1] == 0:
        return
    else:
        y = g.make(op, [a], x.shape)
    pair(g, y)


def pair_move(g: Growing) -> None:
    """Movements between two pairs of one scale."""
    x = g.operand(ranks=(2, 3, 4))
    q, s, z = quantized(g, x)
    y = g.make("DequantizeLinear", [q, s, z], x.shape)
    if g.chance(0.5):
        perm = [int(axis) for axis in g.random.permutation(x.rank)]
        y = g.make("Transpose", [y], [x.shape[axis] for axis in perm], perm=perm)
    else:
        axis = g.integer(0, x.rank - 1)
        if isinstance(x.shape[axis], str):
            return
        shape = [2 * s if at == axis else s for at, s in enumerate(x.shape)]  # type: ignore[operator]
        y = g.make("Concat", [y, y], shape, axis=axis)
    q = g.make("QuantizeLinear", [y, s, z], y.shape, q.dtype)
    g.make("DequantizeLinear", [q, s, z], y.shape)


def pair_pool(g: Growing) -> None:
    x = g.image(g.pick(1, 2, 2))
    kernel = taps(g, x.rank - 2)
    found = windows(g, x, kernel)
    if found is None:
        return
    attrs, sizes = found
    op = g.pick("MaxPool", "AveragePool", "GlobalAveragePool")
    a = pair(g, x)
    if op == "GlobalAveragePool":
        pair(g, g.make(op, [a], [*x.shape[:2], *[1] * (x.rank - 2)]))
        return
    pair(g, g.make(op, [a], [*x.shape[:2], *sizes], **attrs))


def matmul_integer(g: Growing) -> None:
    kind, other = g.pick(U8, I8), g.pick(I8, I8, U8)
    x = g.operand(kind, (2, 2, 3, 4), exact=True)
    depth = x.shape[-1]
    if isinstance(depth, str):
        return
    columns = g.size()
    shape = [depth, columns]
    w = g.constant(g.array(shape, dtype=other)) if g.chance(0.7) else g.enter(shape, other)
    x_zero = zero_point(g, kind) if g.chance(0.7) else None
    each = (columns,) if g.chance(0.3) else ()
    w_zero = zero_point(g, other, each) if g.chance(0.5) else None
    y = g.make("MatMulInteger", [x, w, x_zero, w_zero], [*x.shape[:-1], columns], I32, True)
    rescaled(g, y)


def rescaled(g: Growing, y: Value) -> None:
    """Sums as floats again."""
    if g.chance(0.6):
        real = g.make("Cast", [y], y.shape, to=1, exact=True)
        g.make("Mul", [real, g.constant(np.float32(0.0001))], y.shape)


def conv_integer(g: Growing) -> None:
    kind, other = g.pick(U8, U8, I8), g.pick(I8, I8, U8)
    x = g.image(g.pick(1, 2, 2), kind, exact=True)
    made = _window(g, x)
    if made is None:
        return
    attrs, shape, filters, _ = made
    w = g.constant(g.array(filters, dtype=other))
    x_zero = zero_point(g, kind) if g.chance(0.7) else None
    w_zero = zero_point(g, other) if g.chance(0.5) else None
    rescaled(g, g.make("ConvInteger", [x, w, x_zero, w_zero], shape, I32, True, **attrs))


def _window(g: Growing, x: Value) -> tuple[Any, list[Size], list[int], int] | None:
    """Attributes, shape of the result, shape of the filter, products of a sum."""
    channels = x.shape[1]
    if not isinstance(channels, int) or channels == 0:
        return None
    kernel = taps(g, x.rank - 2)
    found = windows(g, x, kernel)
    if found is None:
        return None
    groups, each, filters = grouping(g, channels)
    if groups == 1:
        filters = g.pick(*CHANNELS)
    attrs = {**found[0], "group": groups}
    shape = [x.shape[0], groups * filters, *found[1]]
    return attrs, shape, [groups * filters, each, *kernel], each * int(np.prod(kernel))


def qlinear_conv(g: Growing) -> None:
    kind = g.pick(U8, U8, I8)
    other = I8 if kind == I8 else g.pick(I8, U8)
    x = g.image(g.pick(1, 2, 2), kind)
    made = _window(g, x)
    if made is None:
        return
    attrs, shape, filters, fan = made
    w = g.constant(g.array(filters, dtype=other))
    each = (filters[0],) if other == I8 and g.chance(0.5) else ()
    w_scale = g.constant((np.abs(g.array(each)) + np.float32(0.1)).astype(np.float32))
    w_zero = zero_point(g, other) if not each else g.constant(np.zeros(each, np.int8))
    y_scale = g.constant(np.float32(60 * fan**0.5 * g.random.uniform(0.7, 1.5) / 100))
    bias = g.constant(g.array([filters[0]], dtype=I32) * np.int32(50)) if g.chance(0.5) else None
    given = [
        x,
        scale(g),
        zero_point(g, kind),
        w,
        w_scale,
        w_zero,
        y_scale,
        zero_point(g, kind),
        bias,
    ]
    g.make("QLinearConv", given, shape, kind, **attrs)


def qlinear_matmul(g: Growing) -> None:
    kind = g.pick(U8, I8)
    other = I8 if kind == I8 else g.pick(I8, U8)
    x = g.operand(kind, (2, 3))
    depth = x.shape[-1]
    if isinstance(depth, str):
        return
    columns = g.size()
    w = g.constant(g.array([depth, columns], dtype=other))
    y_scale = g.constant(np.float32(60 * max(1, depth) ** 0.5 * g.random.uniform(0.7, 1.5) / 100))
    w_scale = g.constant(np.float32(g.random.uniform(0.3, 1)))
    given = [x, scale(g), zero_point(g, kind), w, w_scale, zero_point(g, other)]
    shape = [*x.shape[:-1], columns]
    g.make("QLinearMatMul", [*given, y_scale, zero_point(g, kind)], shape, kind)


def dynamic(g: Growing) -> None:
    """A product of rows that are quantized by the run, with one scale for all of them."""
    x = g.operand(ranks=(2, 2, 3))
    depth = x.shape[-1]
    if isinstance(depth, str) or 0 in x.shape:
        return
    results = [(U8, x.shape, False), (F32, (), False), (U8, (), False)]
    q, s, z = g.nodes_of("DynamicQuantizeLinear", [x], results)
    columns = g.pick(1, 2, 8, 17)
    w = g.constant(g.array([depth, columns], dtype=I8))
    shape = [*x.shape[:-1], columns]
    y = g.make("MatMulInteger", [q, w, z], shape, I32)
    y = g.make("Cast", [y], shape, to=1)
    both = g.make("Mul", [s, g.constant(np.float32(0.01))], ())
    g.make("Mul", [y, both], shape)


STEPS = [
    lone_pair,
    *[pair_conv] * 4,
    pair_conv_transpose,
    *[pair_matmul] * 3,
    *[pair_product] * 2,
    *[pair_elementwise] * 2,
    pair_move,
    pair_pool,
    *[matmul_integer] * 2,
    *[conv_integer] * 2,
    *[qlinear_conv] * 2,
    qlinear_matmul,
    dynamic,
]
