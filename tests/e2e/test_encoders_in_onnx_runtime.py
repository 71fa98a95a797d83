"""Exported quantized encoders are bit-identical in bitwright and in ONNX Runtime."""

import numpy as np
import onnxruntime as ort
import pytest

import bitwright as bw
from bitwright.target import host
from other_runtimes import exact_onnxruntime

WIDTH, HEADS, TOKENS, WORDS = 64, 2, 40, 100
KINDS = {
    "after a norm, gelu": {"norm": "layer_norm", "first": False, "gate": "gelu"},
    "before a norm, gelu by tanh": {
        "norm": "layer_norm",
        "gate": "gelu",
        "how": {"approximate": "tanh"},
    },
    "rotated, gated by silu": {"norm": "rms_norm", "gate": "silu", "gated": True, "rotated": True},
    "of features": {"norm": "layer_norm", "gate": "quick_gelu", "features": True},
}


class Encoder:
    """One block of attention and two or three products, with norms before or after both."""

    def __init__(self, norm, gate, how=None, first=True, gated=False, rotated=False, features=None):
        self.rng, self.b = np.random.default_rng(0), bw.Builder("encoder")
        self.norm_op, self.gate, self.how = norm, gate, how or {}
        self.first, self.gated, self.rotated, self.features = first, gated, rotated, features

    def draw(self, *shape, scale=1.0, mean=0.0):
        return (mean + scale * self.rng.normal(size=shape)).astype(np.float32)

    def linear(self, x, width, rows=WIDTH):
        b, w = self.b, self.draw(rows, width, scale=rows**-0.5)
        return b.add(b.matmul(x, w), self.draw(width, scale=0.1))

    def norm(self, x):
        given = [self.draw(WIDTH, scale=0.1, mean=1.0)]
        if self.norm_op == "layer_norm":
            given.append(self.draw(WIDTH, scale=0.1))
        return self.b.op(self.norm_op, x, *given)

    def attention(self, x, mask):
        b, heads = self.b, (x.shape[0], TOKENS, HEADS, WIDTH // HEADS)
        parts = [b.reshape(self.linear(x, WIDTH), shape=heads) for _ in range(3)]
        q, k, v = (b.transpose(part, perm=(0, 2, 1, 3)) for part in parts)
        if self.rotated:
            places = b.cast(b.input("places", f"i64[{TOKENS}, 1]"), to="f32")
            angles = b.mul(places, (100 ** (-np.arange(16) / 16)).astype(np.float32))
            q, k = (b.rotary(part, b.cos(angles), b.sin(angles)) for part in (q, k))
        y = b.transpose(b.attention(q, k, v, mask), perm=(0, 2, 1, 3))
        return self.linear(b.reshape(y, shape=(x.shape[0], TOKENS, WIDTH)), WIDTH)

    def inner(self, x):
        y = self.b.op(self.gate, self.linear(x, 2 * WIDTH), **self.how)
        if self.gated:
            y = self.b.mul(y, self.linear(x, 2 * WIDTH))
        return self.linear(y, WIDTH, rows=2 * WIDTH)

    def build(self):
        b, positions = self.b, self.draw(TOKENS, WIDTH)
        if self.features:
            x = self.linear(b.input("x", f"f32[n, {TOKENS}, 24]"), WIDTH, rows=24)
        else:
            x = b.gather(b.constant(self.draw(WORDS, WIDTH)), b.input("x", f"i64[n, {TOKENS}]"))
        x = b.add(x, positions)
        mask = b.input("mask", f"bool[n, 1, 1, {TOKENS}]")
        for part in (lambda v: self.attention(v, mask), self.inner):
            x = b.add(x, part(self.norm(x))) if self.first else self.norm(b.add(x, part(x)))
        return b.build(y=self.norm(x) if self.first else x)

    def feeds(self, rows, seed):
        rng = np.random.default_rng(seed)
        x = rng.integers(0, WORDS, (rows, TOKENS))
        if self.features:
            x = rng.normal(size=(rows, TOKENS, 24)).astype(np.float32)
        lengths = rng.integers(5, TOKENS + 1, (rows, 1, 1, 1))
        found = {"x": x, "mask": np.arange(TOKENS) < lengths}
        if self.rotated:
            found["places"] = np.arange(TOKENS)[:, None] + rng.integers(0, 50)
        return found


@exact_onnxruntime
@pytest.mark.skipif(not host().has_fma, reason="ONNX Runtime's products and sums are fused")
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind, tmp_path):
    encoder, path = Encoder(**KINDS[kind]), tmp_path / "encoder.onnx"
    q = bw.quantize(encoder.build(), [encoder.feeds(2, seed) for seed in range(4)])
    assert q.report.int8_mac_fraction == 1.0
    q.save(path, consumer="onnxruntime")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    models = [bw.compile(path, threads=1), bw.compile(path, threads=2), bw.compile(q)]
    for rows in (1, 3):
        feeds = encoder.feeds(rows, seed=10 + rows)
        (theirs,) = session.run(None, feeds)
        for model in models:
            np.testing.assert_array_equal(model.run(feeds)["y"], theirs)
