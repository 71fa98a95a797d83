"""Kernels of products with weights in blocks, against the reference, for rows of any number."""

import numpy as np
import pytest
from block_runs import TARGETS, run_kernel

import bitwright as bw
from bitwright.errors import RunError
from bitwright.ops.core.registry import get
from bitwright.ops.quant.block_formats import FORMATS
from bitwright.ops.quant.block_matmul import random_blocks

CONSTANTS = {"block_matmul": (1,), "block_grouped_matmul": (1,), "block_gather": (0,)}
CASES = [
    pytest.param(op, case, id=f"{op}-{number}")
    for op in CONSTANTS
    for number, case in enumerate(get(op).samples())
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op, case", CASES)
def test_samples(op, case, target):
    found, expected = run_kernel(op, case.inputs, case.attrs, CONSTANTS[op], target, threads=2)
    if not case.tolerance:
        assert found.tobytes() == expected.tobytes()
        return
    scale = np.abs(expected).max(initial=1e-30)
    np.testing.assert_allclose(found, expected, rtol=0, atol=case.tolerance * scale)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q2_K", "IQ4_XS", "F16"])
def test_bits_of_a_row_depend_on_nothing_else(name, target):
    """Any number of rows, in one or in several groups, and any number of threads."""
    form = FORMATS[name]
    weights = random_blocks(35, form=form, blocks=2)
    depth = weights.shape[1] // form.nbytes * form.elements
    x = np.random.default_rng(1).standard_normal((37, depth)).astype(np.float32)
    attrs = {"format": name}
    whole, expected = run_kernel("block_matmul", (x, weights), attrs, (1,), target, threads=3)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5 * scale)
    for rows in (1, 2, 3, 5, 15, 16, 17):
        part, _ = run_kernel("block_matmul", (x[-rows:], weights), attrs, (1,), target, threads=2)
        assert part.tobytes() == whole[-rows:].tobytes(), rows


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_are_not_finite_make_their_row_nan(target):
    weights = random_blocks(16, form=FORMATS["Q4_0"], blocks=2)
    x = np.ones((3, 64), np.float32)
    x[1, 40], x[2, 3] = np.nan, -np.inf
    found, _ = run_kernel("block_matmul", (x, weights), {"format": "Q4_0"}, (1,), target)
    assert np.isfinite(found[0]).all() and np.isnan(found[1:]).all()


@pytest.mark.parametrize("counts", [(1, 1), (3, 3), (5, -1), (-1, 5), (2**62, 2**62)])
def test_counts_that_do_not_divide_the_rows_are_an_error(counts):
    b = bw.Builder("grouped")
    x, given = b.input("x", "f32[n, 32]"), b.input("counts", "i64[2]")
    weights = b.constant(random_blocks(2, 5, form=FORMATS["Q8_0"]))
    exe = bw.compile(b.build(y=b.block_grouped_matmul(x, weights, given, format="Q8_0")), threads=2)
    with pytest.raises(RunError, match="outside"):
        exe.run({"x": np.ones((4, 32), np.float32), "counts": np.array(counts)})


def test_an_empty_table_has_no_row():
    b = bw.Builder("empty")
    table = b.constant(np.zeros((0, 34), np.uint8))
    exe = bw.compile(b.build(y=b.block_gather(table, b.input("i", "i64[n]"), format="Q8_0")))
    assert exe.run(np.zeros(0, np.int64))["y"].shape == (0, 32)
    with pytest.raises(RunError, match="outside"):
        exe.run(np.zeros(2, np.int64))
