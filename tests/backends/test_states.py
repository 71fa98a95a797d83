"""States that users or other sizes replace: kernels write to them, so they are checked."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import RunError
from bitwright.pipeline import compile_graph


def sums(shape="4"):
    b = bw.Builder("sums")
    x, total = b.input("x", f"f32[{shape}]"), b.state("total", type_=f"f32[{shape}]")
    y = b.add(total, x)
    b.update(total, y)
    return compile_graph(b.build(y=y), threads=1)


def test_a_state_of_other_sizes_is_an_error():
    """Its size is that of the first run."""
    exe = sums("n, 4")
    for _ in range(2):
        exe.run(np.ones((2, 4), np.float32))
    for n in (1, 500):
        with pytest.raises(RunError, match="state 'total' has another type"):
            exe.run(np.ones((n, 4), np.float32))
    assert exe.run(np.ones((2, 4), np.float32))["y"].max() == 3
    exe.reset()
    assert exe.run(np.ones((500, 4), np.float32))["y"].max() == 1


@pytest.mark.parametrize("array", [np.ones(3, np.float32), np.ones(4), np.ones((2, 2), np.float32)])
def test_a_state_of_another_type_is_an_error(array):
    exe = sums()
    exe.run(np.ones(4, np.float32))
    exe.engine.states["total"] = array
    with pytest.raises(RunError, match=r"expected f32\[4\]"):
        exe.run(np.ones(4, np.float32))


@pytest.mark.parametrize(
    "array", [np.ones(8, np.float32)[::2], np.broadcast_to(np.float32(1), (4,))]
)
def test_a_state_that_kernels_cannot_write_is_copied(array):
    exe = sums()
    exe.engine.states["total"] = array
    for n in (2, 3):
        assert exe.run(np.ones(4, np.float32))["y"].tolist() == [n] * 4
    assert array.max() == 1


def test_an_observed_run_leaves_no_array_of_the_caller_as_state():
    b = bw.Builder("last")
    x, last = b.input("x", "f32[4]"), b.state("last", type_="f32[4]")
    b.update(last, x)
    exe = compile_graph(b.build(y=b.add(last, x)), threads=1)
    given = np.ones(4, np.float32)
    exe.run(given, observe=lambda value, array: None)
    assert exe.run(np.full(4, 7, np.float32))["y"].tolist() == [8] * 4
    assert given.tolist() == [1] * 4
