"""The f32 matmul kernel: awkward sizes, every target, any number of threads, its assembly."""

import numpy as np
import pytest
from emitted import WIDTHS, Compiled, instructions

from bitwright.backends.cpu.codegen.emit import Module, f32
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import (
    UNROLL,
    Tile,
    best_tile,
    emit_matmul,
    pack,
    row_tiles_in_cache,
)
from bitwright.target import host, named

SIZES = [(0, 5, 4), (5, 0, 4), (4, 5, 0), (1, 1, 1), (1, 384, 33), (7, 16, 17), (16, 17, 7)]
SIZES += [(17, 33, 127), (33, 127, 16), (127, 49, 3), (9, 48, 64), (10, 97, 5)]


def biased_relu(f, value, row, column, mask):
    bias = f.load(value.type, f.args.pointer("bias"), column, mask=mask)
    return f.max(value + bias, 0.0) + f.load(f32, f.args.pointer("scale"), row)


EPILOGUE = Epilogue(biased_relu, pointers=("bias", "scale"))


@pytest.fixture(scope="module", params=WIDTHS)
def kernels(request):
    found = []
    for epilogue in (None, EPILOGUE):
        module = Module(named(request.param))
        emit_matmul(module, "kernel", **({"epilogue": epilogue} if epilogue else {}))
        found.append(Compiled(module))
    return found


def run(kernel, a, w, threads=1, stride=0, block=0, **slots):
    target, (rows, depth), columns = kernel.module.target, a.shape, w.shape[1]
    tile = best_tile(target)
    held = np.full((rows, depth + stride), np.nan, "f4")
    held[:, :depth] = a
    y = np.full((rows + 1, columns + stride), 7, "f4")
    kernel(
        threads=threads,
        a=held,
        w=pack(w, tile),
        y=y,
        rows=rows,
        columns=columns,
        depth=depth,
        a_stride=depth + stride,
        y_stride=columns + stride,
        block=block or row_tiles_in_cache(target, tile, 4 * depth),
        **slots,
    )
    assert (y[rows:] == 7).all() and (y[:, columns:] == 7).all()
    return y[:rows, :columns]


@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_any_size_and_any_number_of_threads(kernels, rows, columns, depth):
    rng = np.random.default_rng(0)
    a, w = (
        rng.normal(size=(rows, depth)).astype("f4"),
        rng.normal(size=(depth, columns)).astype("f4"),
    )
    first = run(kernels[0], a, w)
    exact = a.astype("f8") @ w.astype("f8")
    np.testing.assert_allclose(first, exact, 1e-5, 1e-5 * np.abs(exact).max(initial=1))
    for threads, block in ((2, 1), (3, 2), (7, 0)):
        np.testing.assert_array_equal(run(kernels[0], a, w, threads, 3, block), first)


@pytest.mark.parametrize("rows, columns, depth", SIZES[3:8])
def test_epilogues_read_their_row_and_columns(kernels, rows, columns, depth):
    rng = np.random.default_rng(1)
    a, w = (
        rng.normal(size=(rows, depth)).astype("f4"),
        rng.normal(size=(depth, columns)).astype("f4"),
    )
    bias, scale = rng.normal(size=columns).astype("f4"), rng.normal(size=rows).astype("f4")
    found = run(kernels[1], a, w, 2, bias=bias, scale=scale)
    expected = np.maximum(run(kernels[0], a, w) + bias, 0) + scale[:, None]
    np.testing.assert_array_equal(found, expected)


def test_nan_and_infinity_stay_in_their_row(kernels):
    a, w = np.ones((5, 3), "f4"), np.ones((3, 4), "f4")
    a[1, 0], a[3, 1] = np.nan, np.inf
    y = run(kernels[0], a, w)
    assert np.isnan(y[1]).all() and np.isinf(y[3]).all() and (y[[0, 2, 4]] == 3).all()


def inner_loop(module):
    """The instructions of the basic block with the most multiply-adds."""
    blocks, current = [], []
    for line in instructions(module):
        current.append(line)
        if line.startswith("j"):
            blocks.append(current)
            current = []
    return max(blocks, key=lambda block: sum("fmadd" in line for line in block))


@pytest.mark.skipif(not host().is_x86, reason="looks at x86 registers")
@pytest.mark.parametrize("name, register", [("avx512", "zmm"), ("avx2", "ymm")])
def test_the_inner_loop_is_fma_on_the_widest_registers_without_spills(name, register):
    module = Module(named(name))
    emit_matmul(module, "kernel")
    tile, loop = best_tile(module.target), inner_loop(module)
    fused = [line for line in loop if line.startswith("vfmadd") and f"%{register}" in line]
    assert len(fused) == UNROLL * tile.rows * tile.vectors
    assert not [line for line in loop if f"%{register}" in line and "(%rsp)" in line]


def test_packing_pads_the_last_panel():
    w = np.arange(10, dtype="f4").reshape(2, 5)
    packed = pack(w, Tile(1, 1, 4))
    assert packed.shape == (2, 2, 4)
    assert packed[1].tolist() == [[4, 0, 0, 0], [9, 0, 0, 0]]


def test_the_tile_depends_on_the_columns():
    target = named("avx512")
    assert [best_tile(target, n).columns for n in (0, 384, 64, 32, 16, 48)] == [
        48,
        48,
        64,
        32,
        16,
        48,
    ]


def test_heights_go_down_to_one_row():
    assert Tile(9, 3, 16).heights == (1, 2, 4, 9)
    assert Tile(1, 3, 16).heights == (1,)
