"""Row kernels: norms and softmax with what is fused around them, at awkward sizes."""

import numpy as np
import pytest
from on_gpu import check_graph, check_node, compiled

import bitwright as bw

RNG = np.random.default_rng(0)
SIZES = (1, 7, 16, 17, 33, 127)


def floats(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("columns", SIZES)
def test_norms_at_sizes(columns):
    check_node("layer_norm", floats(5, columns), floats(columns), floats(columns), atol=1e-5)
    check_node("rms_norm", floats(3, columns), floats(columns), rtol=1e-5)
    check_node("softmax", floats(7, columns), axis=-1)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)])
def test_empty(shape):
    check_node("softmax", floats(*shape), axis=-1)
    check_node("dynamic_quantize", floats(*shape), to="u8", per_token=True)


def test_other_axes_and_several_axes():
    check_node("softmax", floats(3, 17, 5), axis=1)
    check_node("log_softmax", floats(33, 4), axis=0, atol=1e-5)
    check_node("layer_norm", floats(2, 7, 5), floats(7, 5), None, axis=1, atol=1e-5)


def test_long_rows_are_read_once_per_pass():
    """Rows of unknown length, longer than a block."""
    b = bw.Builder("g")
    x, w = b.input("x", "f32[n, m]"), b.input("w", "f32[m]")
    graph = b.build(s=b.softmax(x), n=b.layer_norm(x, w))
    check_graph(graph, {"x": floats(3, 2500), "w": floats(2500)}, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", ["u8", "i8", "f8e4m3fn", "f8e5m2"])
@pytest.mark.parametrize("rows", [1, 17])
def test_residual_norm_and_quantize_are_one_kernel(to, rows):
    b = bw.Builder("g")
    x, r = b.input("x", "f32[n, 33]"), b.input("r", "f32[n, 33]")
    y = b.layer_norm(b.add(x, r), floats(33), floats(33))
    q, scale, zero = b.dynamic_quantize(y, to=to, per_token=True)
    results = {"y": y, "real": b.dequantize(q, scale, zero, axis=1, block=33), "scale": scale}
    exe = compiled(b.build(**results))
    assert sum("layer_norm" in name for name in exe.engine.artifact.sources) == 1
    feeds = {"x": floats(rows, 33), "r": floats(rows, 33)}
    got = exe.run(feeds)
    want = bw.compile(exe.graph, target="reference").run(feeds)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["scale"], want["scale"], rtol=1e-5)
    step = np.abs(want["y"]) * 0.13 + 1e-3 if to.startswith("f8") else 1.01 * want["scale"]
    assert (np.abs(got["real"] - want["real"]) <= step).all()


def test_rows_quantize_to_the_reference_integers():
    for to in ("u8", "i8"):
        check_node("dynamic_quantize", floats(17, 127), to=to, per_token=True)
    x = floats(4, 9)
    x[1] = 0
    check_node("dynamic_quantize", x, to="f8e4m3fn", per_token=True)


def test_epilogue_of_a_norm_quantizes_statically():
    b = bw.Builder("g")
    x = b.input("x", "f32[n, 33]")
    y = b.quantize(b.gelu(b.rms_norm(x, floats(33))), np.float32(0.02), np.uint8(120), to="u8")
    exe = compiled(b.build(y=y))
    assert len(exe.engine.artifact.sources) == 1
    feeds = {"x": floats(7, 33)}
    got, want = exe.run(feeds)["y"], bw.compile(exe.graph, target="reference").run(feeds)["y"]
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


def test_half_rows():
    for dtype in (np.float16, "bfloat16"):
        x = floats(7, 33).astype(dtype)
        check_node("layer_norm", x, x[0], x[1], rtol=2e-2, atol=2e-2)
        check_node("softmax", x, axis=-1, atol=2e-3)
