"""Exact products by vpmaddubsw, which saturates: split weights and permuted channels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kernel import Run, lower
from test_integer_kernels import check, convolved, product, qvalues, wrapped

from bitwright.backends.cpu.kernels.matmul import lower_reorder as ordered
from bitwright.backends.cpu.kernels.matmul.dot.int8_pairs import GROUP, LARGEST, SplitWeights
from bitwright.backends.cpu.kernels.matmul.lower_reorder import permutation, plan_split
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.kernels.matmul.reorder import BLOCK, best_order, masks_of
from bitwright.ops.core.builder import Builder
from bitwright.target import named

TARGETS = [name for name in ("avx2", "avx512") if named(name).runs_here()]


def trained(rng, *shape, tail=6):
    """Weights distributed as after training: few are large, and those reach the limits."""
    found = rng.standard_t(tail, shape)
    scaled = 127 * found / np.abs(found).max(axis=tuple(range(found.ndim - 1)), initial=1e-9)
    return np.rint(scaled).astype(np.int8)


def extremes(rng, kind, *shape):
    """Many values at the ends of their range, where sums are largest."""
    ends = {"u8": (0, 255), "i8": (-128, 127)}[kind]
    found = qvalues(rng, kind, *shape)
    return np.where(rng.random(shape) < 0.7, ends[1], np.where(found < 0, ends[0], found)).astype(
        found.dtype
    )


def is_split(graph, target):
    return any("pmadd.ub.sw" in t or "pmaddubs.w" in t for t in texts(graph, target))


@pytest.fixture
def always(monkeypatch):
    """Weights are always split, and channels always permuted."""
    monkeypatch.setattr(ordered, "MOST_REST", 1.0)
    monkeypatch.setattr(ordered, "_PASS", -1e9)


def texts(graph, target):
    ctx = lower(graph, named(target))
    return [ctx.text(kernel) for kernel in ctx.kernels.values()]


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([4, 8, 36]), st.booleans())
def test_no_pair_of_the_main_part_can_saturate(seed, columns, depth, is_uniform):
    rng = np.random.default_rng(seed)
    w = qvalues(rng, "i8", 2, depth, columns) if is_uniform else trained(rng, 2, depth, columns)
    split = SplitWeights(w, 8, (2,))
    pairs = split.main.astype(int).reshape(2, -1, 2, columns)
    assert np.maximum(pairs, 0).sum(2).max() <= LARGEST
    assert np.minimum(pairs, 0).sum(2).min() >= -LARGEST
    arrays = split.arrays(Tile(3, 3, 8))
    begins, places, rest = (arrays[name] for name in ("rest_begins", "rest_places", "rest"))
    again = split.main.astype(int)
    for vector in range(len(begins) - 1):
        for entry in range(begins[vector], begins[vector + 1]):
            run, place = places[entry]
            for lane in range(8):
                column = vector * 8 + lane
                if column < columns:
                    again[run, place : place + GROUP, column] += rest[entry, lane]
                else:
                    assert not rest[entry, lane].any()
    np.testing.assert_array_equal(again, w)


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 100]), st.integers(1, 3))
def test_an_order_is_a_permutation_of_every_block(seed, channels, taps):
    w = trained(np.random.default_rng(seed), taps, channels, 24)
    order = best_order(w, LARGEST)
    assert order.shape == (channels // BLOCK, BLOCK)
    assert (np.sort(order, axis=1) == np.arange(BLOCK)).all()
    places = permutation(order, channels)
    assert sorted(places) == list(range(channels))
    x = np.arange(channels, dtype=np.uint8)
    for block, (own, other) in enumerate(masks_of(order)):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        found = np.zeros(BLOCK, np.uint8)
        for source, mask in ((part, own), (np.roll(part, 16), other)):
            for i, at in enumerate(mask):
                if at < 0x80:
                    found[i] |= source[i // 16 * 16 + at]
        np.testing.assert_array_equal(found, part[order[block]])


def test_an_order_leaves_fewer_conflicts():
    w = trained(np.random.default_rng(3), 1, 128, 96, tail=12)
    plan = plan_split(named("avx2"), w, 128)
    assert plan is not None and plan.order is not None
    assert plan.weights.rest_fraction < SplitWeights(w, 8).rest_fraction / 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 33])
@pytest.mark.parametrize("depth, columns", [(4, 5), (32, 8), (36, 17), (100, 24), (192, 49)])
@pytest.mark.usefixtures("always")
def test_products(target, kind, rows, depth, columns):
    rng = np.random.default_rng(rows + depth)
    x, w = extremes(rng, kind, rows, depth), trained(rng, depth, columns)
    zero, bias = qvalues(rng, kind, 1)[0], rng.integers(-9999, 9999, columns).astype(np.int32)
    b = Builder("product")
    given = b.constant(w), b.constant(zero), None, b.constant(bias)
    graph = b.build(b.integer_matmul(b.input("x", f"{kind}[{rows}, {depth}]"), *given))
    assert is_split(graph, target)
    check(graph, {"x": x}, wrapped(product(x, w, zero, 0, bias)), target)


@pytest.mark.parametrize("target", TARGETS)
def test_weights_with_many_conflicts_use_16_bit_products(target):
    rng = np.random.default_rng(5)
    x, w = extremes(rng, "u8", 9, 64), rng.choice(np.array([-128, 127], np.int8), (64, 24))
    b = Builder("product")
    graph = b.build(b.integer_matmul(b.input("x", "u8[9, 64]"), b.constant(w)))
    assert not is_split(graph, target)
    check(graph, {"x": x}, wrapped(product(x, w)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.usefixtures("always")
def test_zero_points_of_rows(target):
    rng = np.random.default_rng(6)
    x, w, zero = extremes(rng, "u8", 7, 96), trained(rng, 96, 40), qvalues(rng, "u8", 7, 1)
    b = Builder("product")
    y = b.integer_matmul(b.input("x", "u8[7, 96]"), b.constant(w), b.input("zero", "u8[7, 1]"))
    check(b.build(y), {"x": x, "zero": zero}, wrapped(product(x, w, zero)), target)


CONVS = {
    "pointwise": ((2, 64, 5, 7), (24, 64, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    "strided pointwise": ((2, 64, 5, 7), (24, 64, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
    "window": ((2, 32, 7, 9), (40, 32, 3, 3), (2, 2), (1, 0, 1, 2), (1, 1)),
    "line": ((1, 64, 1, 19), (16, 64, 1, 5), (1, 1), (0, 2, 0, 2), (1, 1)),
    "column": ((1, 48, 9, 5), (16, 48, 4, 1), (1, 1), (1, 0, 2, 0), (1, 1)),
    "dilated": ((1, 48, 9, 11), (17, 48, 2, 3), (1, 2), (1, 2, 0, 2), (2, 3)),
    "more than a block": ((2, 72, 6, 5), (12, 72, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    "padded, more than a block": ((2, 40, 6, 5), (12, 40, 2, 2), (1, 1), (1, 1, 0, 1), (1, 1)),
    "window of incomplete blocks": ((1, 36, 7, 6), (17, 36, 2, 3), (2, 1), (0, 0, 0, 0), (1, 1)),
    "no whole block": ((1, 20, 6, 6), (9, 20, 2, 2), (1, 1), (0, 0, 0, 0), (1, 1)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("form", CONVS)
@pytest.mark.usefixtures("always")
def test_convolutions(target, kind, form):
    rng = np.random.default_rng(8)
    x_shape, w_shape, strides, pads, dilations = CONVS[form]
    x = extremes(rng, kind, *x_shape)
    w = trained(rng, *w_shape[1:], w_shape[0], tail=5).transpose(3, 0, 1, 2).copy()
    zero, none = qvalues(rng, kind, 1)[0], np.zeros(w_shape[0], np.int64)
    b = Builder("conv")
    image = b.input("x", f"{kind}{list(x_shape)}")
    attrs = {"strides": strides, "pads": pads, "dilations": dilations}
    graph = b.build(b.integer_conv(image, b.constant(w), b.constant(zero), **attrs))
    assert is_split(graph, target)
    sums = convolved(x, w, int(zero), none, none, strides, pads, dilations, 1)
    check(graph, {"x": x}, wrapped(sums), target, [1, 3])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("channels", [20, 64])
@pytest.mark.usefixtures("always")
def test_an_image_with_strided_pixels(target, channels):
    """Channels of a wider image: the elements of a filter line are not contiguous."""
    rng = np.random.default_rng(9)
    x = extremes(rng, "u8", 2, 7, 8, channels + 12)
    w = trained(rng, channels, 3, 3, 16, tail=5).transpose(3, 0, 1, 2).copy()
    b = Builder("conv")
    wide = b.transpose(b.input("x", f"u8[2, 7, 8, {channels + 12}]"), perm=(0, 3, 1, 2))
    image = b.slice(wide, starts=(4,), stops=(4 + channels,), axes=(1,), steps=(1,))
    graph = b.build(b.integer_conv(image, b.constant(w), strides=(2, 1)))
    assert is_split(graph, target)
    none = np.zeros(16, np.int64)
    taken = x.transpose(0, 3, 1, 2)[:, 4 : 4 + channels]
    sums = convolved(taken, w, 0, none, none, (2, 1), (0, 0, 0, 0), (1, 1), 1)
    for threads in (1, 3):
        (found,) = Run(graph, {"x": x}, named(target), threads).outputs.values()
        np.testing.assert_array_equal(found, wrapped(sums))
