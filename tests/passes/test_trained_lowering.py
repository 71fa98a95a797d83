"""Products whose weights, biases and scales are trained give the bits of those with constants."""

import numpy as np
import pytest
from trained_and_frozen import check

PADS = {"pads": (1, 1, 1, 1)}


def images(count=3, channels=16, size=7, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(count, channels, size, size)).astype(np.float32)}


def rows(seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(19, 24)).astype(np.float32)}


def conv(m, x, channels=16, groups=1, bits=8, given=16, scale=0.02):
    w = m.weight(channels, given // groups, 3, 3, axis=0, bits=bits, scale=scale)
    return m.b.conv(x, w, m.bias(channels), groups=groups, **PADS)


def channel_factors(m, count=16):
    """Factors of channels, as smoothing leaves them; they are constants in both forms."""
    array = np.random.default_rng(9).uniform(0.5, 2, (1, count, 1, 1)).astype(np.float32)
    return m.b.constant(array)


def conv_chain(m):
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.through(m.b.relu(conv(m, x)), 0.03, 0)
    return m.b.build(conv(m, y, channels=5))


def residual(m):
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.b.relu(conv(m, m.through(m.b.relu(conv(m, x)), 0.03, 0)))
    return m.b.build(m.through(m.b.relu(m.b.add(x, y)), 0.05, 0))


def smoothed_and_read_twice(m):
    """relu(conv) is read by a sum as it is, and by the next convolution behind factors."""
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.b.relu(conv(m, x))
    z = conv(m, m.through(m.b.mul(y, channel_factors(m)), 0.03, 0))
    return m.b.build(m.b.relu(m.b.add(y, z)))


def smoothed_and_negative(m):
    """Factors before a quantization with a zero point, of values read twice."""
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = conv(m, x)
    z = conv(m, m.through(m.b.mul(y, channel_factors(m)), 0.2, 100))
    return m.b.build(m.b.add(y, z))


def smoothed_relu6(m):
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.b.clip(conv(m, x), np.float32(0), np.float32(1))
    z = conv(m, m.through(m.b.mul(y, channel_factors(m)), 0.03, 0))
    return m.b.build(m.b.add(y, z))


def large_bias(m):
    """A bias that leaves i32 at the scale of the products stays a float addition."""
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    w = m.weight(16, 16, 3, 3, axis=0, scale=1e-9)
    y = m.b.relu(m.b.conv(x, w, m.bias(16, scale=3.0), **PADS))
    z = conv(m, m.through(m.b.mul(y, channel_factors(m)), 0.03, 0))
    return m.b.build(m.b.add(y, z))


def depthwise(m):
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.through(m.b.relu(conv(m, x, groups=16)), 0.03, 0)
    return m.b.build(conv(m, y))


def narrow_weights(m):
    x = m.through(m.b.input("x", "f32[n, 16, h, w]"), 0.02, 120)
    y = m.through(m.b.relu(conv(m, x, bits=4)), 0.03, 0)
    return m.b.build(conv(m, y, bits=2))


def dense_chain(m):
    x = m.through(m.b.input("x", "f32[n, 24]"), 0.02, 130)
    y = m.b.relu(m.b.add(m.b.matmul(x, m.weight(24, 33, axis=1)), m.bias(33)))
    y = m.through(y, 0.02, 0)
    return m.b.build(m.b.add(m.b.matmul(y, m.weight(33, 7)), m.bias(7)))


@pytest.mark.parametrize(
    "make",
    [
        conv_chain,
        residual,
        large_bias,
        depthwise,
        narrow_weights,
    ],
)
def test_convolutions(make):
    assert "integer_conv" in check(make, images())


@pytest.mark.parametrize("make", [smoothed_and_read_twice, smoothed_and_negative, smoothed_relu6])
def test_factors_before_a_quantization_join_its_scale(make):
    """Another order of roundings changes about one value of 100,000: many are compared."""
    assert "integer_conv" in check(make, images(64, size=48), threads=(2,))


def test_dense_layers():
    assert "integer_matmul" in check(dense_chain, rows())
