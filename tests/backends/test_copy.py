"""Copies between strided views, and the ops that are copies, against numpy and the interpreter."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_same,
    feeds_of,
    graph_of,
    lower,
    reference,
)

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.codegen import jit
from bitwright.errors import RunError
from bitwright.ir.dtype import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.target import host, named

WIDTHS = ["i8", "f16", "f32", "i64", "c128"]


def numbers(*shape, element="f32", seed=0):
    """Random bytes, so that equal elements are unlikely."""
    width = dtype(element).numpy.itemsize
    count = int(np.prod(shape, dtype=np.int64)) * width
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return raw.view(f"u{width}" if width <= 8 else "c16").reshape(shape)


def check(op, *arrays, target="host", shapes=None, **attrs):
    graph = graph_of(op, *arrays, shapes=shapes, **attrs)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)
    ctx = lower(graph, named(target))
    for threads in (1, 2, 3):
        done = Run(graph, feeds, threads=threads, ctx=ctx)
        assert done.fault is None
        for name, result in expected.items():
            assert_same(done.outputs[name], result)
    return ctx


TRANSPOSES = [
    ((3, 5), (1, 0)),
    ((16, 16), (1, 0)),
    ((33, 17), (1, 0)),
    ((127, 70), (1, 0)),
    ((300, 9), (1, 0)),
    ((3, 65), (1, 0)),
    ((65, 3), (1, 0)),
    ((2, 4, 3, 33), (0, 2, 3, 1)),
    ((2, 130, 2), (0, 2, 1)),
    ((2, 33, 3, 16), (0, 2, 1, 3)),
    ((2, 40, 7, 33), (0, 3, 1, 2)),
    ((3, 4, 5, 2), (2, 0, 1, 3)),
    ((5, 6, 7), (2, 1, 0)),
    ((1, 7, 1), (2, 1, 0)),
    ((0, 4), (1, 0)),
    ((), ()),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("element", WIDTHS)
def test_transposes(target, element):
    for shape, perm in TRANSPOSES:
        check("transpose", numbers(*shape, element=element), target=target, perm=perm)


@pytest.mark.parametrize("target", TARGETS)
def test_any_chain_of_views(target):
    """Transpose, slice with any step, broadcast, transpose: one copy."""
    random = np.random.default_rng(7)
    for turn in range(40):
        rank = int(random.integers(1, 5))
        shape = tuple(int(n) for n in random.choice([1, 2, 3, 7, 16, 17, 33], rank))
        element = WIDTHS[turn % len(WIDTHS)]
        x = numbers(*shape, element=element, seed=turn)
        b = Builder("chain")
        value = b.input("x", TensorType(dtype(x.dtype), shape))
        value = b.transpose(value, perm=random.permutation(rank).tolist())
        axis, step = int(random.integers(rank)), int(random.choice([1, 2, -1, -3]))
        size = value.shape[axis]
        start, stop = (size // 3, size) if step > 0 else (size - 1, -1)
        value = b.slice(value, starts=[start], stops=[stop], steps=[step], axes=[axis])
        if turn % 3 == 0:
            value = b.expand(value, shape=(3, *value.shape))
        if turn % 2:
            value = b.transpose(value, perm=random.permutation(value.rank).tolist())
        graph = b.build(y=value)
        done = Run(graph, {"x": x}, named(target), threads=1 + turn % 3)
        assert_same(done.outputs["y"], np.array(reference(graph, {"x": x})["y"]))


@pytest.mark.parametrize("shape, perm", [("[n, m]", (1, 0)), ("[n, m, 8]", (1, 0, 2))])
def test_sizes_are_slots(shape, perm):
    """One kernel serves every size."""
    texts = set()
    for rows, columns in [(1, 1), (17, 33), (64, 7), (130, 129), (0, 5)]:
        x = numbers(rows, columns, *([8] if len(perm) == 3 else []))
        ctx = check("transpose", x, shapes={0: shape}, perm=perm)
        texts |= {ctx.text(kernel) for kernel in ctx.kernels.values()}
    assert len(texts) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_concat(target):
    for element in WIDTHS:
        parts = [numbers(2, n, 5, element=element, seed=n) for n in (3, 1, 0, 17)]
        check("concat", *parts, target=target, axis=1)
    check("concat", draw(3, 7), draw(3, 9, seed=1), target=target, axis=-1)
    check("concat", draw(30, 1), draw(30, 1, seed=1), target=target, axis=1)
    check("concat", draw(200, 33), draw(5, 33, seed=1), target=target, axis=0)


@pytest.mark.parametrize("target", TARGETS)
def test_tile_and_expand(target):
    check("tile", draw(3, 1, 5), target=target, repeats=(2, 7, 3))
    check("tile", draw(40, dtype="i8"), target=target, repeats=(9,))
    check("tile", draw(2, 3), target=target, repeats=(0, 4))
    for element in WIDTHS:
        check("expand", numbers(3, 1, element=element), target=target, shape=(2, 3, 37))
    check("expand", draw(1, 33), target=target, shape=(21, 33))


PADS = [
    ((5, 7), (1, 2, 3, 4)),
    ((4, 33), (0, -2, 1, 20)),
    ((3, 4, 5), (0, 2, 0, 0, 1, 0)),
    ((2, 3, 17, 18), (0, 0, 1, 1, 0, 0, 2, 1)),
    ((6, 5), (-2, 3, 1, -4)),
    ((300,), (9, 200)),
    ((1, 3), (2, 2, 2, 2)),
]


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("target", TARGETS)
def test_pad(target, mode):
    for number, (shape, pads) in enumerate(PADS):
        x = numbers(*shape, element=WIDTHS[number % 4], seed=number)
        value = x.reshape(-1)[-1:].reshape(()) if number % 2 and mode == "constant" else None
        check("pad", x, value, target=target, pads=pads, mode=mode)


def test_pad_of_nothing():
    check("pad", draw(0, 2), pads=(2, 0, 0, 1))
    graph = graph_of("pad", draw(0, 3), shapes={0: "[n, 3]"}, pads=(2, 0, 0, 0), mode="edge")
    done = Run(graph, {"in0": draw(0, 3)})
    assert done.fault is not None


@pytest.mark.parametrize("target", TARGETS)
def test_roll(target):
    check("roll", draw(4, 33), target=target, shifts=[2, -5], axes=[0, 1])
    check("roll", draw(7, 8, 3, dtype="i16"), target=target, shifts=[-3, 100], axes=[0, -2])
    check("roll", draw(2, 5), target=target, shifts=[3], axes=[1], shapes={0: "[n, m]"})


def test_reshape_of_a_transpose_copies_once():
    x = draw(4, 6, 5)
    b = Builder("merge")
    value = b.transpose(b.input("x", "f32[4, 6, 5]"), perm=(1, 0, 2))
    graph = b.build(y=b.reshape(value, shape=(24, 5)))
    done = Run(graph, {"x": x})
    assert_same(done.outputs["y"], x.transpose(1, 0, 2).reshape(24, 5).copy())


def test_wide_tiles_use_shuffles():
    """A transpose moves vectors, not elements."""
    graph = graph_of("transpose", draw(64, 64), perm=(1, 0))
    for target, words in {"avx2": ("vunpck", "vperm2"), "sse2": ("unpckl", "unpckh")}.items():
        ctx = lower(graph, named(target))
        (kernel,) = ctx.kernels.values()
        text = jit.assembly(ctx.text(kernel), named(target))
        assert all(word in text for word in words)


@pytest.mark.parametrize("batch", [1, 2])
def test_images_stay_channels_last(batch):
    """concat and pad keep the layout of their operands: only the output is transposed."""
    xs = [draw(batch, 5, 6, channels, seed=channels) for channels in (3, 17)]
    b = Builder("images")
    values = [b.input(f"x{i}", TensorType(dtype(x.dtype), x.shape)) for i, x in enumerate(xs)]
    joined = b.concat(*(b.transpose(v, perm=(0, 3, 1, 2)) for v in values), axis=1)
    padded = b.pad(joined, pads=(0, 0, 1, 2, 0, 0, 3, 0))
    graph = b.build(y=b.transpose(padded, perm=(0, 2, 3, 1)))
    feeds = {f"x{i}": x for i, x in enumerate(xs)}
    done = Run(graph, feeds, threads=2)
    assert [step.why for step in done.schedule.steps] == [
        "contiguous copy",
        "contiguous copy",
        "",
        "contiguous copy",
    ]
    assert_same(done.outputs["y"], np.array(reference(graph, feeds)["y"]))


def test_a_symbolic_size_of_1_broadcasts():
    b = Builder("grow")
    x, y = b.input("x", "f32[n]"), b.input("y", "f32[m]")
    graph = b.build(z=b.expand(x, shape=(2, y.shape[0])))
    program = CpuBackend(host()).compile(graph, threads=1)
    for count in (1, 5):
        feeds = {"x": draw(count), "y": draw(5)}
        assert_same(program.run(feeds)["z"], reference(graph, feeds)["z"])
    with pytest.raises(RunError):
        program.run({"x": draw(3), "y": draw(5)})


def test_reshape_with_unproved_sizes():
    """Sizes whose equality is only known at run time still give a view."""
    b = Builder("trust")
    x, y = b.input("x", "f32[n, 6]"), b.input("y", "f32[m]")
    graph = b.build(z=b.neg(b.reshape(x, shape=(y.shape[0], 2))))
    program = CpuBackend(host()).compile(graph, threads=1)
    assert not list(program.schedule.fallbacks)
    feeds = {"x": draw(4, 6), "y": draw(12)}
    assert_same(program.run(feeds)["z"], reference(graph, feeds)["z"])
    with pytest.raises(RunError):
        program.run({"x": draw(4, 6), "y": draw(13)})
    check("reshape", draw(0, 3), shape=(3, 0, 2))
