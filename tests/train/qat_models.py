"""Small models with random weights for tests of training through quantization."""

import numpy as np

import bitwright as bw


class Weights:
    """Random weights as parameters of a builder."""

    def __init__(self, b, seed=0):
        self.b, self.rng = b, np.random.default_rng(seed)

    def __call__(self, name, *shape, size=None):
        spread = size or 1 / np.sqrt(max(np.prod(shape[1:]), 1))
        return self.b.parameter(name, self.rng.normal(0, spread, shape).astype(np.float32))


def conv_chain():
    b = bw.Builder("conv_chain")
    w = Weights(b)
    x = b.input("x", "f32[batch, 3, 8, 8]")
    for i, (given, made) in enumerate(((3, 8), (8, 16), (16, 16))):
        x = b.conv(x, w(f"w{i}", made, given, 3, 3), w(f"b{i}", made, size=0.2), pads=(1, 1, 1, 1))
        x = b.relu(x)
    return b.build(y=x)


def residual():
    b = bw.Builder("residual")
    w = Weights(b)
    x = b.input("x", "f32[batch, 3, 8, 8]")
    x = b.relu(b.conv(x, w("w0", 8, 3, 3, 3), w("b0", 8, size=0.2), pads=(1, 1, 1, 1)))
    y = b.relu(b.conv(x, w("w1", 8, 8, 3, 3), w("b1", 8, size=0.2), pads=(1, 1, 1, 1)))
    y = b.conv(y, w("w2", 8, 8, 3, 3), w("b2", 8, size=0.2), pads=(1, 1, 1, 1))
    x = b.relu(b.add(x, y))
    x = b.conv(x, w("w3", 8, 8, 1, 1), w("b3", 8, size=0.2))
    return b.build(y=x)


def depthwise():
    b = bw.Builder("depthwise")
    w = Weights(b)
    x = b.input("x", "f32[batch, 3, 8, 8]")
    x = b.relu(b.conv(x, w("w0", 16, 3, 1, 1), w("b0", 16, size=0.2)))
    x = b.conv(x, w("w1", 16, 1, 3, 3), w("b1", 16, size=0.2), pads=(1, 1, 1, 1), groups=16)
    x = b.clip(x, np.float32(0), np.float32(6))
    x = b.conv(x, w("w2", 8, 16, 1, 1), w("b2", 8, size=0.2))
    return b.build(y=x)


def mlp():
    b = bw.Builder("mlp")
    w = Weights(b)
    x = b.input("x", "f32[batch, 20]")
    for i, (given, made) in enumerate(((20, 64), (64, 48), (48, 10))):
        x = b.add(
            b.matmul(x, w(f"w{i}", given, made, size=given**-0.5)), w(f"b{i}", made, size=0.2)
        )
        x = b.relu(x) if i < 2 else x
    return b.build(y=x)


def transformer():
    b = bw.Builder("transformer")
    w = Weights(b)
    x = b.input("x", "f32[batch, 12, 32]")

    def linear(v, name, given, made):
        v = b.matmul(v, w(f"{name}.w", given, made, size=given**-0.5))
        return b.add(v, w(f"{name}.b", made, size=0.1))

    def heads(v):
        return b.transpose(b.reshape(v, shape=(v.shape[0], 12, 4, 8)), perm=(0, 2, 1, 3))

    one = b.parameter("n1", np.ones(32, np.float32)), b.parameter("n2", np.ones(32, np.float32))
    v = b.layer_norm(x, one[0], axis=-1, eps=1e-5)
    q, k, value = (heads(linear(v, name, 32, 32)) for name in "qkv")
    scores = b.mul(b.matmul(q, b.transpose(k, perm=(0, 1, 3, 2))), np.float32(8**-0.5))
    mixed = b.matmul(b.softmax(scores, axis=-1), value)
    mixed = b.reshape(b.transpose(mixed, perm=(0, 2, 1, 3)), shape=(x.shape[0], 12, 32))
    x = b.add(x, linear(mixed, "o", 32, 32))
    v = b.layer_norm(x, one[1], axis=-1, eps=1e-5)
    x = b.add(x, linear(b.gelu(linear(v, "up", 32, 64)), "down", 64, 32))
    return b.build(y=x)


MODELS = {f.__name__: f for f in (conv_chain, residual, depthwise, mlp, transformer)}


def data_of(graph, batch=16, count=4, seed=3):
    """Batches of inputs of a model."""
    rng = np.random.default_rng(seed)
    (x,) = graph.inputs
    shape = (batch, *x.shape[1:])
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]
