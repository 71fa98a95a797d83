"""Small float models for each kind of quantized layer, with inputs."""

import numpy as np

import bitwright as bw


class Draw:
    """Repeatable weights and inputs."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape, terms):
        return (self.rng.normal(size=shape) / np.sqrt(terms)).astype(np.float32)

    def values(self, *shape):
        return self.rng.normal(size=shape).astype(np.float32)


def dense(d):
    b = bw.Builder("dense")
    x = b.input("x", "f32[n, 96]")
    y = b.gelu(b.add(b.matmul(x, d.weight(96, 80, terms=96)), d.values(80)))
    return b.build(y=b.matmul(y, d.weight(80, 24, terms=80))), lambda: {"x": d.values(32, 96)}


def conv(d):
    b = bw.Builder("conv")
    x = b.input("x", "f32[n, 3, 10, 10]")
    y = b.relu(b.conv(x, d.weight(16, 3, 3, 3, terms=27), d.values(16), pads=(1, 1, 1, 1)))
    y = b.clip(b.conv(y, d.weight(16, 1, 3, 3, terms=9), groups=16, strides=(2, 2)), 0.0, 6.0)
    y = b.conv(y, d.weight(24, 16, 1, 1, terms=16), d.values(24))
    y = b.relu(b.conv(y, d.weight(24, 12, 3, 3, terms=108), groups=2, pads=(1, 1, 1, 1)))
    y = b.reduce_mean(y, axes=(2, 3), keepdims=False)
    return b.build(y=b.matmul(y, d.weight(24, 8, terms=24))), lambda: {"x": d.values(16, 3, 10, 10)}


def conv_transpose(d):
    b = bw.Builder("upscale")
    x = b.input("x", "f32[n, 8, 6, 6]")
    y = b.relu(b.conv(x, d.weight(16, 8, 3, 3, terms=72), d.values(16), pads=(1, 1, 1, 1)))
    y = b.conv_transpose(y, d.weight(16, 8, 4, 4, terms=64), strides=(2, 2), pads=(1, 1, 1, 1))
    return b.build(y=y), lambda: {"x": d.values(2, 8, 6, 6)}


def recurrent(op):
    gates = {"lstm": 4, "gru": 3}[op]

    def build(d):
        b = bw.Builder(op)
        x = b.input("x", "f32[t, n, 24]")
        w, r = d.weight(1, gates * 32, 24, terms=24), d.weight(1, gates * 32, 32, terms=32)
        y = getattr(b, op)(x, w, r, hidden=32)[0]
        y = b.reshape(y, shape=(y.shape[0], y.shape[2], 32))
        return b.build(y=b.matmul(y, d.weight(32, 8, terms=32))), lambda: {"x": d.values(9, 8, 24)}

    return build


def encoder(d):
    """An embedding, attention and a gated block between norms."""
    b = bw.Builder("encoder")
    tokens, width, heads = 40, 64, 2
    linear = lambda v, n, k=width: b.add(b.matmul(v, d.weight(k, n, terms=k)), d.values(n))
    norm = lambda v: b.layer_norm(v, 1 + d.values(width) / 4, d.values(width) / 4)
    split = lambda v: b.transpose(
        b.reshape(v, shape=(v.shape[0], tokens, heads, width // heads)), perm=(0, 2, 1, 3)
    )
    x = b.gather(b.constant(d.values(50, width)), b.input("x", f"i64[n, {tokens}]"))
    h = norm(x)
    y = b.attention(*(split(linear(h, width)) for _ in range(3)))
    y = b.reshape(b.transpose(y, perm=(0, 2, 1, 3)), shape=(x.shape[0], tokens, width))
    x = b.add(x, linear(y, width))
    h = norm(x)
    x = b.add(x, linear(b.mul(b.silu(linear(h, 96)), linear(h, 96)), width, 96))
    feeds = lambda: {"x": d.rng.integers(0, 50, (2, tokens))}
    return b.build(y=norm(x)), feeds


KINDS = {
    "dense": dense,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "lstm": recurrent("lstm"),
    "gru": recurrent("gru"),
    "encoder": encoder,
}
RECIPES = ("int8", "int8-static", "int8-dynamic", "w8", "w4")
