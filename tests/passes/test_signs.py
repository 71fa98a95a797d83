"""Non-negative values, derived from the ops that compute them."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.passes.signs import is_never_negative

MADE = {
    "relu": (lambda b, x: b.relu(x), True),
    "input": (lambda b, x: x, False),
    "scaled": (lambda b, x: b.mul(b.relu(x), np.float32(0.5)), True),
    "negated": (lambda b, x: b.mul(b.relu(x), np.float32(-0.5)), False),
    "mean": (lambda b, x: b.reduce_mean(b.sigmoid(x), axes=(1,), keepdims=False), True),
    "moved": (lambda b, x: b.transpose(b.reshape(b.relu(x), shape=(3, 2)), perm=(1, 0)), True),
    "sum with an input": (lambda b, x: b.add(b.relu(x), x), False),
    "clip": (lambda b, x: b.clip(x, 0.0, 6.0), True),
    "clip below zero": (lambda b, x: b.clip(x, 0.0, -1.0), False),
    "clip from below": (lambda b, x: b.clip(x, -1.0, 6.0), False),
}


@pytest.mark.parametrize("name", MADE)
def test_signs(name):
    make, expected = MADE[name]
    b = bw.Builder("signs")
    assert is_never_negative(make(b, b.input("x", "f32[2, 3]"))) == expected
