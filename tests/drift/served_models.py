"""Small quantized models and data for tests of drift."""

import numpy as np

import bitwright as bw

FEATURES = 16


def mlp():
    """Two layers; the first one's input is standard normal data."""
    rng = np.random.default_rng(0)
    b = bw.Builder("mlp")
    x = b.input("x", f"f32[n, {FEATURES}]")
    first, last = (b.parameter(f"{n}.weight", _weights(rng)) for n in ("first", "last"))
    h = b.relu(b.matmul(x, first, name="h"))
    return b.build(y=b.matmul(h, last, name="out"))


def _weights(rng):
    return (rng.normal(size=(FEATURES, FEATURES)) / 4).astype(np.float32)


def batches(count, seed, scale=1.0, rows=32):
    rng = np.random.default_rng(seed)
    return [
        {"x": (scale * rng.normal(size=(rows, FEATURES))).astype(np.float32)} for _ in range(count)
    ]


def quantized(recipe="int8-static", **options):
    return bw.quantize(mlp(), batches(24, seed=1), recipe, threads=1, **options)
