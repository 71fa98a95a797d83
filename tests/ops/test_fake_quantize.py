"""Straight-through gradients of fake quantization, against formulas in numpy and PyTorch's LSQ."""

import numpy as np
import pytest

from bitwright.autodiff.grad import grad
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw
from bitwright.passes.expand_fake_quantize import expand_fake_quantize
from bitwright.passes.manager import run_passes
from bitwright.pipeline import compile_graph

STE = ("identity", "clipped", "tanh", "hard_tanh")


def gradients(op, arrays, dy, **attrs):
    """y, dx and dscale of the sum of y * dy."""
    b = Builder("fake")
    values = [b.input(name, f"{d}[{', '.join(map(str, a.shape))}]") for name, d, a in arrays]
    y = b.op(op, *values, **attrs)
    loss = b.reduce_sum(b.mul(y, dy), axes=tuple(range(dy.ndim)), keepdims=False)
    graph = grad(b.build(y=y, loss=loss), "loss", wrt=["x", "scale"])
    found = run(graph, {name: a for name, _, a in arrays})
    return found["y"], found["grad.x"], found["grad.scale"]


def factor_of(ste, ratio, limit, inside):
    return {
        "identity": np.ones_like(ratio),
        "clipped": inside.astype(float),
        "tanh": 1 - np.tanh(ratio / limit) ** 2,
        "hard_tanh": np.maximum(0, 1 - np.abs(ratio) / limit),
    }[ste]


@pytest.mark.parametrize("ste", STE)
def test_gradients_per_tensor(ste):
    x, dy = draw(5, 7, low=-3, high=3, dtype="f64"), draw(5, 7, seed=1, dtype="f64")
    scale, low, high = np.float64(0.3), -8, 7
    _, dx, ds = gradients(
        "fake_quantize",
        [("x", "f64", x), ("scale", "f64", scale)],
        dy,
        low=low,
        high=high,
        ste=ste,
    )
    ratio = x / scale
    inside = (ratio >= low) & (ratio <= high)
    np.testing.assert_allclose(dx, dy * factor_of(ste, ratio, high, inside), rtol=1e-12)
    term = np.where(inside, np.rint(ratio) - ratio, np.clip(ratio, low, high))
    expected = (dy * term).sum() / np.sqrt(x.size * high)
    np.testing.assert_allclose(ds, expected, rtol=1e-12)


@pytest.mark.parametrize("axis, block", [(0, 0), (1, 0), (-1, 0), (1, 3), (0, 2), (2, 8)])
def test_scale_gradients_by_granularity(axis, block):
    x, dy = draw(4, 7, 5, dtype="f64"), draw(4, 7, 5, seed=1, dtype="f64")
    at = axis % 3
    groups = -(-x.shape[at] // block) if block else x.shape[at]
    shape = tuple(groups if i == at else n for i, n in enumerate(x.shape)) if block else (groups,)
    scale = draw(*shape, seed=2, low=0.2, high=0.5, dtype="f64")
    _, _, ds = gradients(
        "fake_quantize",
        [("x", "f64", x), ("scale", "f64", scale)],
        dy,
        low=-2,
        high=1,
        axis=axis,
        block=block,
    )
    wide = (
        np.repeat(scale, block, axis=at)
        if block
        else scale.reshape([-1 if i == at else 1 for i in range(3)])
    )
    wide = np.take(wide, range(x.shape[at]), axis=at) if block else np.broadcast_to(wide, x.shape)
    ratio = x / wide
    term = dy * np.where(
        (ratio >= -2) & (ratio <= 1), np.rint(ratio) - ratio, np.clip(ratio, -2, 1)
    )
    if block:
        edges = range(0, x.shape[at], block)
        expected = np.add.reduceat(term, edges, axis=at)
    else:
        expected = term.sum(axis=tuple(i for i in range(3) if i != at))
    count = x.size // scale.size
    np.testing.assert_allclose(ds, expected / np.sqrt(count), rtol=1e-10, atol=1e-12)


def test_zero_points_move_the_clip_range():
    x, dy = draw(40, low=-2, high=2, dtype="f64"), draw(40, seed=1, dtype="f64")
    scale, zero = np.float64(0.01), np.asarray(100, np.uint8)
    y, dx, ds = gradients(
        "fake_quantize",
        [("x", "f64", x), ("scale", "f64", scale), ("z", "u8", zero)],
        dy,
        low=0,
        high=255,
    )
    assert y.min() == -1.0 and y.max() == 1.55
    inside = (x / scale + 100 >= 0) & (x / scale + 100 <= 255)
    np.testing.assert_array_equal(dx != 0, inside)
    assert np.isfinite(ds)


def test_scale_gradient_agrees_with_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    whole = rng.integers(-12, 12, (3, 50))
    scale = np.array([0.1, 0.3, 0.05], np.float32)
    part = rng.uniform(-0.3, 0.3, whole.shape)  # away from the ends, where rounding first differs
    x = ((whole + part) * scale[:, None]).astype(np.float32)
    dy = rng.normal(size=x.shape).astype(np.float32)
    _, dx, ds = gradients(
        "fake_quantize",
        [("x", "f32", x), ("scale", "f32", scale)],
        dy,
        low=-8,
        high=7,
        axis=0,
    )
    tx, ts = torch.tensor(x, requires_grad=True), torch.tensor(scale, requires_grad=True)
    zero = torch.zeros(3, requires_grad=True)
    g = 1 / np.sqrt(50 * 7)
    y = torch._fake_quantize_learnable_per_channel_affine(tx, ts, zero, 0, -8, 7, g)
    y.backward(torch.tensor(dy))
    outside = (whole == -8) | (whole == 7)  # torch clips by the rounded value
    np.testing.assert_allclose(np.where(outside, 0, dx), np.where(outside, 0, tx.grad.numpy()))
    y = torch._fake_quantize_learnable_per_channel_affine(tx, ts, zero, 0, -8, 7, g)
    keep = np.where(outside, 0, dy)
    ts.grad = None
    y.backward(torch.tensor(keep))
    _, _, ds = gradients(
        "fake_quantize",
        [("x", "f32", x), ("scale", "f32", scale)],
        keep,
        low=-8,
        high=7,
        axis=0,
    )
    np.testing.assert_allclose(ds, ts.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ste", STE)
def test_binarize(ste):
    x, dy = draw(4, 6, dtype="f64"), draw(4, 6, seed=1, dtype="f64")
    x[0, 0] = 0
    scale = np.abs(x).mean(axis=1)
    y, dx, ds = gradients(
        "fake_binarize", [("x", "f64", x), ("scale", "f64", scale)], dy, axis=0, ste=ste
    )
    sign = np.where(x >= 0, 1, -1)
    np.testing.assert_array_equal(y, sign * scale[:, None])
    ratio = x / scale[:, None]
    np.testing.assert_allclose(dx, dy * factor_of(ste, ratio, 1, np.abs(ratio) <= 1), rtol=1e-12)
    np.testing.assert_allclose(ds, (dy * sign).sum(axis=1) / np.sqrt(6), rtol=1e-12)


CASES = {
    "int8": ("fake_quantize", {"low": -128, "high": 127}, 0.02),
    "symmetric": ("fake_quantize", {"low": -127, "high": 127}, 0.02),
    "int4": ("fake_quantize", {"low": -8, "high": 7}, 0.3),
    "ternary": ("fake_quantize", {"low": -1, "high": 1}, 0.9),
    "uint4": ("fake_quantize", {"low": 0, "high": 15}, 0.1),
    "channels": ("fake_quantize", {"low": -8, "high": 7, "axis": 1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "blocks": ("fake_quantize", {"low": -8, "high": 7, "axis": 1, "block": 2}, "blocks"),
    "binary": ("fake_binarize", {"axis": 0}, "rows"),
}


@pytest.mark.parametrize("case", CASES)
def test_expansion_keeps_bits(case):
    """The pairs of a deployed model give the bits of fake quantization, also compiled."""
    op, attrs, scale = CASES[case]
    x = draw(33, 5, low=-4, high=4)
    x[:3] = np.rint(x[:3] / 0.3) * np.float32(0.3) + np.float32(0.15)  # near ties
    if scale == "blocks":
        scale = draw(33, 3, low=0.1, high=0.9)
    elif scale == "rows":
        scale = draw(33, low=0.1, high=0.9)
    b = Builder("pairs")
    s = b.state("scale", np.asarray(scale, np.float32))
    graph = b.build(y=b.op(op, b.input("x", "f32[33, 5]"), s, **attrs))
    expanded = run_passes(graph, (expand_fake_quantize,))
    assert not any(node.op.startswith("fake") for node in expanded.nodes)
    assert any(node.op == "dequantize" for node in expanded.nodes)
    expected = run(graph, {"x": x})["y"]
    np.testing.assert_array_equal(run(expanded, {"x": x})["y"], expected)
    np.testing.assert_array_equal(compile_graph(expanded).run({"x": x})["y"], expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_dynamic_expansion_keeps_bits(per_token):
    x = draw(33, 5, low=-4, high=1)
    b = Builder("dynamic")
    graph = b.build(y=b.fake_dynamic_quantize(b.input("x", "f32[n, 5]"), per_token=per_token))
    expanded = run_passes(graph, (expand_fake_quantize,))
    expected = run(graph, {"x": x})["y"]
    np.testing.assert_array_equal(compile_graph(expanded).run({"x": x})["y"], expected)
