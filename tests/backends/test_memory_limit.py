"""Runs above the memory limit raise an error and have no other effect."""

import numpy as np
import pytest

from bitwright.errors import RunError
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_MAX_TENSOR_BYTES", "100000")


def test_known_sizes_run_after_a_run_above_the_limit():
    b = Builder("softmax")
    graph = b.build(y=b.softmax(b.softmax(b.input("x", "f32[n, 8]"), axis=0), axis=-1))
    executable = compile_graph(graph)
    small, large = np.ones((4, 8), np.float32), np.ones((5000, 8), np.float32)
    expected = executable.run({"x": small})["y"]
    for _ in range(2):
        with pytest.raises(RunError, match="would need"):
            executable.run({"x": large})
        np.testing.assert_array_equal(executable.run({"x": small})["y"], expected)


def test_data_dependent_sizes_run_again_if_one_arena_is_too_large():
    b = Builder("found")
    y = b.softmax(b.softmax(b.cast(b.nonzero(b.input("x", "f32[n]")), to="f32"), axis=-1), axis=0)
    executable = compile_graph(b.build(y=b.softmax(b.add(y, y), axis=1)))
    x = np.ones(9000, np.float32)
    for _ in range(4):
        assert executable.run({"x": x})["y"].shape == (1, 9000)
