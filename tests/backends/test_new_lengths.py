"""Plans of new lengths: memory plans are reused, and sizes are still checked."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError


def test_other_lengths_reuse_a_memory_plan():
    """A new length fills a table from another one; results and checks stay those of its sizes."""
    b = bw.Builder("lengths")
    x = b.input("x", "f32[n, 4]")
    w = b.parameter("w", np.arange(16, dtype=np.float32).reshape(4, 4))
    y = b.relu(b.matmul(b.softmax(b.matmul(x, w), axis=-1), w))
    exe = bw.compile(b.build(y=y, z=b.reduce_sum(y, axes=[1])), threads=2)
    plans, rng = exe.engine._plans, np.random.default_rng(0)
    for n in (3, 200, 1, 7, 150, 199, 3, 0, 130):
        feed = rng.standard_normal((n, 4)).astype(np.float32)
        found, expected = exe.run(feed), bw.compile(exe.graph, target="reference").run(feed)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
    assert len({id(memory.plan) for memory, _ in plans.tables.values()}) <= 2
    with pytest.raises(BitwrightError):
        exe.run(np.zeros((5, 3), np.float32))


def test_checks_of_some_sizes_run_for_every_length():
    """A size that must equal a constant is checked again, whatever lengths ran before."""
    b = bw.Builder("checked")
    x, y = b.input("x", "f32[n]"), b.input("y", "f32[m]")
    exe = bw.compile(
        b.build(z=b.add(b.reshape(x, shape=[*x.shape, 1]), b.reshape(y, shape=[1, 4])))
    )
    for n in (2, 3, 9):
        assert (
            exe.run({"x": np.ones(n, np.float32), "y": np.ones(4, np.float32)})["z"].shape[0] == n
        )
    with pytest.raises(BitwrightError):
        exe.run({"x": np.ones(5, np.float32), "y": np.ones(3, np.float32)})
