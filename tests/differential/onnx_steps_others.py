"""Steps of other kinds: sampling, sizes that the data decides, shapes as values, bodies."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_growing import BOOL, F32, I64, U8, Growing, Size, Value, count
from onnx_steps_window import taps, windows


def grid_sample(g: Growing) -> None:
    spatial = g.pick(2, 2, 2, 3)
    x = g.image(spatial)
    if 0 in x.shape:
        return
    sizes = [g.pick(1, 2, 3, 5) for _ in range(spatial)]
    grid = g.enter([x.shape[0], *sizes, spatial])
    wide = g.make("Mul", [grid, g.constant(np.float32(g.pick(0.9, 1.4)))], grid.shape)
    mode = g.pick("linear", "linear", "cubic" if spatial == 2 else "linear")
    padding = g.pick("zeros", "border", "reflection")
    if mode == "cubic" and padding == "border":
        padding = "zeros"  # ONNX moves the place into the image, ONNX Runtime each of its taps
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": g.pick(0, 1)}
    g.make("GridSample", [x, wide], [*x.shape[:2], *sizes], **attrs)


def found_places(g: Growing) -> None:
    """How many there are, only the data tells."""
    x = g.operand(ranks=(1, 2, 3), exact=True)
    if 0 in x.shape:
        return
    some = g.make("Relu", [x], x.shape, exact=True)
    op = g.pick("NonZero", "Compress", "Compress")
    if op == "NonZero":
        y = g.make(op, [some], [x.rank, g.unknown()], I64, True)
        g.make("Cast", [y], y.shape, exact=True, to=TensorProto.FLOAT)
        return
    axis = g.integer(0, x.rank - 1)
    size = x.shape[axis]
    if isinstance(size, str):
        return
    chosen = g.decisive(g.array([size], dtype=BOOL))
    shape = [g.unknown() if at == axis else s for at, s in enumerate(x.shape)]
    y = g.move(op, [x, chosen], shape, axis=axis)
    if g.chance(0.6):
        g.make(g.pick("Tanh", "Exp"), [y], y.shape)


def shapes(g: Growing) -> None:
    """A shape as a value, and what is made of it."""
    x = g.operand(ranks=(1, 2, 3, 4))
    attrs = {}
    length = x.rank
    if g.chance(0.3):
        begin = g.integer(0, x.rank)
        attrs, length = {"start": begin}, x.rank - begin
    shape = g.make("Shape", [x], [length], I64, True, **attrs)
    if not length:
        return
    sizes = list(x.shape[x.rank - length :])
    filled = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.5])
    if g.real == F32 and g.chance(0.5):
        g.make("ConstantOfShape", [shape], sizes, F32, True, value=filled)
    elif not attrs:
        one = g.enter([1] * x.rank)
        g.move("Expand", [one, shape], sizes)


def unpooled(g: Growing) -> None:
    """A pool with the places of its maxima."""
    x = g.image(g.pick(1, 2, 2), exact=True)
    if 0 in x.shape:
        return
    found = windows(g, x, taps(g, x.rank - 2))
    if found is None:
        return
    attrs, sizes = found
    if max(attrs["dilations"]) > 1:  # windows that lie in the padding only have no maximum
        return
    shape = [*x.shape[:2], *sizes]
    g.nodes_of("MaxPool", [x], [(F32, shape, True), (I64, shape, True)], **attrs)


def bytes_pool(g: Growing) -> None:
    x = g.image(g.pick(1, 2, 2), U8)
    if 0 in x.shape:
        return
    found = windows(g, x, taps(g, x.rank - 2))
    if found is not None and max(found[0]["dilations"]) == 1:
        g.make("MaxPool", [x], [*x.shape[:2], *found[1]], U8, True, **found[0])


def rotary(g: Growing) -> None:
    batch: Size = "n" if g.is_symbolic else g.pick(1, 2)
    heads, length, features = g.pick(1, 2, 3), g.pick(1, 2, 5), g.pick(2, 4, 8, 16)
    x = g.enter([batch, heads, length, features])
    positions = 9
    cos, sin = (g.constant(g.array([positions, features // 2])) for _ in range(2))
    if batch == "n":
        return
    ids = g.decisive(g.random.integers(0, positions, [batch, length]))
    attrs = {"interleaved": g.pick(0, 1)}
    g.make("RotaryEmbedding", [x, cos, sin, ids], x.shape, **attrs)


def branches(g: Growing) -> None:
    """An If whose branches read what is outside."""
    x = g.operand(ranks=(1, 2, 3))
    condition = g.decisive(np.array(g.chance(0.5)))

    def branch(*ops: str) -> onnx.GraphProto:
        names = [x.name, *(g.name("b") for _ in ops)]
        nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(ops)]
        kind = helper.np_dtype_to_tensor_dtype(g.real)
        result = helper.make_tensor_value_info(names[-1], kind, None)
        return helper.make_graph(nodes, "branch", [], [result])

    g.make(
        "If",
        [condition],
        x.shape,
        then_branch=branch("Tanh", "Abs"),
        else_branch=branch("Sigmoid"),
    )
    g.read.add(x.name)


def bits(g: Growing) -> None:
    x = g.operand(I64, ranks=(1, 2, 3), exact=True)
    other: Value = g.other(x.shape, I64)
    op = g.pick("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Less")
    g.make(op, [x, other], x.shape, I64 if op.startswith("Bit") else BOOL, True)


def crop(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3))
    axes = [axis for axis, s in enumerate(x.shape) if isinstance(s, int) and g.chance(0.6)]
    if not axes:
        return
    wanted = [g.pick(0, 1, 2, 5, 8) for _ in axes]
    shape = list(x.shape)
    for axis, size in zip(axes, wanted, strict=True):
        shape[axis] = size
    if count(shape) <= 1 << 14:
        g.move("CenterCropPad", [x, g.numbers(wanted)], shape, axes=axes)


STEPS = [
    *[grid_sample, found_places, shapes] * 2,
    *[unpooled, bytes_pool, rotary, branches, bits, crop],
]
