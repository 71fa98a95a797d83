"""Constants that several nodes read are stored once."""

import numpy as np
import pytest

import bitwright as bw


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_shared_weight_is_packed_once(is_shared):
    """A network unrolled in time, and one with different layers."""
    steps, rng = 6, np.random.default_rng(0)
    weights = [rng.normal(size=(160, 160)).astype(np.float32) / 16 for _ in range(steps)]
    b = bw.Builder("unrolled")
    h = b.input("x", "f32[n, 160]")
    given = [b.parameter(f"w{i}", w) for i, w in enumerate(weights[: 1 if is_shared else steps])]
    for i in range(steps):
        h = b.tanh(b.matmul(h, b.transpose(given[i % len(given)], perm=(1, 0))))
    exe = bw.compile(b.build(y=h))
    held = [
        one.array.nbytes for one in exe.engine.artifact.schedule.buffers if one.array is not None
    ]
    copies = sum(held) / weights[0].nbytes
    assert copies < 1.5 if is_shared else copies >= steps
    x = expected = np.ones((2, 160), np.float32)
    for i in range(steps):
        expected = np.tanh(expected @ weights[i % len(given)].T)
    np.testing.assert_allclose(exe.run({"x": x})["y"], expected, atol=1e-5)
