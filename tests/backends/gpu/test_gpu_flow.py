"""Which kernels a model becomes: 16 bits between quantized products, quantization in the kernels
that make a value, no casts."""

import numpy as np
import pytest
from on_gpu import compiled

import bitwright as bw
from bitwright.lir.schedule import KernelStep

RNG = np.random.default_rng(0)
WIDTH, HEADS, LENGTH = 32, 2, 12


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Layers:
    """An encoder of `count` layers with the norm before (`pre`) or after each part."""

    def __init__(self, pre, count=2):
        self.b = bw.Builder("encoder")
        self.pre = pre
        ids = self.b.input("ids", f"i64[2, {LENGTH}]")
        x = self.b.add(self.b.gather(self.parameter(20, WIDTH), ids, axis=0), floats(LENGTH, WIDTH))
        x = x if pre else self.norm(x)
        for _ in range(count):
            x = self.part(x, self.attention)
            x = self.part(x, self.inner)
        x = self.norm(x) if pre else x
        self.graph = self.b.build(y=self.b.reduce_mean(x, axes=[1], keepdims=False))

    def parameter(self, *shape):
        return self.b.parameter(f"w{len(self.b.nodes)}", floats(*shape) / 4)

    def norm(self, x):
        return self.b.layer_norm(x, floats(WIDTH), floats(WIDTH))

    def part(self, x, make):
        if self.pre:
            return self.b.add(x, make(self.norm(x)))
        return self.norm(self.b.add(x, make(x)))

    def linear(self, x, width):
        b = self.b
        return b.add(b.matmul(x, self.parameter(x.shape[-1], width)), floats(width) / 8)

    def attention(self, x):
        b = self.b
        shape = [2, LENGTH, HEADS, WIDTH // HEADS]
        parts = (b.reshape(self.linear(x, WIDTH), shape=shape) for _ in range(3))
        found = b.attention(*(b.transpose(p, perm=[0, 2, 1, 3]) for p in parts))
        joined = b.reshape(b.transpose(found, perm=[0, 2, 1, 3]), shape=[2, LENGTH, WIDTH])
        return self.linear(joined, WIDTH)

    def inner(self, x):
        return self.linear(self.b.gelu(self.linear(x, 2 * WIDTH)), WIDTH)


FEEDS = {"ids": RNG.integers(0, 20, (2, LENGTH))}


def kernels(recipe, scheme, pre, precision="mixed_bf16"):
    graph = Layers(pre).graph
    if recipe:
        given = {"base": recipe, "schemes": {"*": scheme}, "smooth": False}
        graph = bw.quantize(graph, data=[FEEDS], recipe=given).graph
    exe = compiled(graph, precision=precision)
    got = exe.run(FEEDS)["y"]
    want = bw.compile(graph, target="reference").run(FEEDS)["y"]
    assert np.linalg.norm(got - want) <= 0.1 * np.linalg.norm(want)
    return exe, [step for step in exe.engine.schedule.steps if isinstance(step, KernelStep)]


PER_LAYER = {"": 7, "f8-dynamic static": 7, "int8 static": 9, "dynamic_per_token": 9}
"""Products of q, k and v in one (int8 biases keep static ones apart), attention, out, norm, up,
down, norm; dynamic scales of the rows of attention and of the activation take a kernel each."""


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(
    "recipe, scheme",
    [("", ""), *((r, s) for r in ("int8", "f8-dynamic") for s in ("static", "dynamic_per_token"))],
)
def test_kernels_of_encoders(recipe, scheme, pre):
    exe, steps = kernels(recipe, scheme, pre)
    families = [step.family for step in steps]
    per_layer = PER_LAYER.get(scheme) or PER_LAYER[f"{recipe} {scheme}"]
    assert len(families) <= 2 * per_layer + (5 if pre else 3), families
    assert not any(name.startswith("cast") for name in families), families
    assert not any("u8" in name for name in families if name.startswith("matmul")), families
    wide = [b for b in exe.engine.schedule.buffers if b.name != "y" and str(b.dtype) == "f32"]
    most = 2 * LENGTH  # scales of rows
    arena = [b for b in wide if b.storage.name == "ARENA"]
    assert all(b.count <= most for b in arena), arena


def test_a_residual_block_of_convolutions_stores_eight_and_sixteen_bits():
    b = bw.Builder("block")
    x = b.input("x", "f32[2, 8, 6, 6]")
    w = [b.parameter(f"w{n}", floats(8, 8, 1, 1) / 4) for n in range(3)]
    y = b.relu(b.conv(x, w[0]))
    y = b.relu(b.add(b.conv(y, w[1]), b.conv(y, w[2])))
    y = b.relu(b.add(b.conv(y, w[1]), y))
    graph = b.build(y=b.reduce_mean(b.conv(y, w[0]), axes=[2, 3]))
    feeds = {"x": floats(2, 8, 6, 6)}
    recipe = {"base": "int8", "schemes": {"*": "static"}, "smooth": False}
    graph = bw.quantize(graph, data=[feeds], recipe=recipe).graph
    exe = compiled(graph, precision="mixed")
    got, want = exe.run(feeds)["y"], bw.compile(graph, target="reference").run(feeds)["y"]
    assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)
    steps = [s for s in exe.engine.schedule.steps if isinstance(s, KernelStep)]
    stored = {str(buffer.dtype) for step in steps for buffer in step.writes[:1]}
    wide = [s for s in steps if any(w.dtype.name == "f32" and w.count > 16 for w in s.writes)]
    assert not wide and {"i8", "f16"} <= stored, (stored, wide)


def test_the_rows_of_a_norm_are_stored_beside_their_static_quantization():
    b = bw.Builder("g")
    x = b.input("x", "f32[5, 24]")
    y = b.layer_norm(x, floats(24), floats(24))
    q = b.quantize(y, np.float32(0.02), to="f8e4m3fn")
    exe = compiled(b.build(y=y, q=b.dequantize(q, np.float32(0.02))), fallbacks=True)
    feeds = {"x": floats(5, 24)}
    got, want = exe.run(feeds), bw.compile(exe.graph, target="reference").run(feeds)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["q"], want["q"], rtol=0.13, atol=1e-3)
    assert "layer_norm_f32_f8e4m3fn" in {s.family for s in exe.engine.artifact.sources.values()}


def test_a_zero_point_known_after_the_rows():
    b = bw.Builder("g")
    x = b.input("x", "f32[5, 24]")
    y = b.layer_norm(x, floats(24), floats(24))
    zero = b.cast(b.reduce_max(x, axes=(0, 1), keepdims=False), to="i8")
    graph = b.build(y=y, q=b.requantize(b.mul(y, np.float32(20)), zero, to="i8"))
    feeds = {"x": floats(5, 24)}
    got, want = compiled(graph).run(feeds), bw.compile(graph, target="reference").run(feeds)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["q"], want["q"], atol=1)
