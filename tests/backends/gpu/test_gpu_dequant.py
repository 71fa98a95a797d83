"""Weight-only products on the GPU: few rows (words), many rows (tiles), every kind of weight."""

import ml_dtypes
import numpy as np
import pytest
import torch
from on_gpu import check_graph

import bitwright as bw
from bitwright.backends.gpu.kernels.weight_only import packing
from bitwright.ir.dtype import DTYPES, dtype

KINDS = ("i4", "u4", "i8", "u8", "i2", "f4e2m1", "f8e4m3fn", "f8e5m2")
RTOL = {np.float32: 1e-4, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
ATOL = {np.float32: 5e-4, np.float16: 0.1, ml_dtypes.bfloat16: 1.0}


def quantized(kind, rows, depth, seed=1):
    rng, found = np.random.default_rng(seed), DTYPES[kind]
    if found.is_integer:
        values = rng.integers(int(found.min), int(found.max) + 1, (rows, depth))
        return values.astype(found.numpy)
    return (rng.standard_normal((rows, depth)) * 2).astype(found.numpy)


def product(kind, rows, depth, columns, block, element, zero=None, bias=False):
    """relu(dequant_matmul) and its feeds."""
    rng = np.random.default_rng(0)
    b = bw.Builder("g")
    x = b.input("x", f"{dtype(element)}[{rows}, {depth}]")
    blocks = -(-depth // block)
    scale = (np.abs(rng.standard_normal((columns, blocks))) * 0.1 + 0.01).astype(np.float32)
    points = None
    if zero == "same":
        points = b.constant(quantized(kind, columns, blocks, seed=2))
    if zero == "float":
        points = b.constant((rng.standard_normal((columns, blocks)) * 3).astype(np.float32))
    added = b.constant(rng.standard_normal(columns).astype(element)) if bias else None
    q = b.constant(quantized(kind, columns, depth))
    y = b.dequant_matmul(x, q, b.constant(scale), points, added, block=block)
    count = rows if isinstance(rows, int) else 5
    return b.build(y=b.relu(y)), {"x": rng.standard_normal((count, depth)).astype(element)}


def check(graph, feeds):
    element = feeds["x"].dtype.type
    exe = check_graph(graph, feeds, rtol=RTOL[element], atol=ATOL[element])
    return [step.kernel.rpartition("_")[0] for step in exe.engine.artifact.schedule.steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_kind(kind, element):
    zero = "same" if kind.startswith("u") else None
    few = check(*product(kind, 3, 130, 17, 64, element, zero, bias=True))
    many = check(*product(kind, 17, 96, 33, 96, element, zero))
    assert few[-1] == f"dequant_matmul_{kind}_words"
    assert many == [f"dequant_matmul_{kind}_tiles"]
    whole = kind[0] in "iu" and element != np.float32
    assert (few[0] == "quantize_words_16") == whole


@pytest.mark.parametrize("rows, depth, columns", [(1, 32, 1), (1, 64, 7), (7, 33, 16), (8, 127, 5)])
def test_awkward_sizes(rows, depth, columns):
    check(*product("i4", rows, depth, columns, 32, np.float16))
    check(*product("i8", rows, depth, columns, 128, np.float32))


def test_long_sums_are_split():
    found = check(*product("i4", 2, 2560, 16, 128, np.float16))
    assert found == ["quantize_words_16", "dequant_matmul_i4_words", "matmul_sum_parts"]
    found = check(*product("i4", 1, 2560, 16, 128, np.float16))
    assert found == ["dequant_matmul_i4_row", "matmul_sum_parts"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] in "iu"])
@pytest.mark.parametrize("element", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_row(kind, element):
    for zero in (None, "same"):
        for depth, block in ((130, 64), (33, 64), (200, 200)):
            graph, feeds = product(kind, 1, depth, 17, block, element, zero, bias=True)
            assert check(graph, feeds) == [f"dequant_matmul_{kind}_row"]


def gated_layer(kind, norm, width=40, gated=48, rows=1):
    """norm -> gate and value -> act(gate) * value -> product + x."""
    rng = np.random.default_rng(5)
    b = bw.Builder("g")
    x = b.input("x", f"bf16[1, {rows}, {width}]")
    half = ml_dtypes.bfloat16

    def weight(columns, depth):
        scale = (rng.uniform(0.5, 1, (columns, -(-depth // 32))) / 8 / depth**0.5).astype(half)
        return b.constant(quantized(kind, columns, depth, seed=columns)), b.constant(scale)

    scale, bias = rng.uniform(0.5, 1.5, (2, width)).astype(half)
    h = b.rms_norm(x, scale) if norm == "rms_norm" else b.layer_norm(x, scale, bias)
    y = b.dequant_matmul(h, *weight(2 * gated, width), None, None, block=32)
    gate, value = b.split(y, axis=-1, sizes=(gated, gated))
    y = b.mul(b.mul(gate, b.sigmoid(gate)), value)
    y = b.add(x, b.dequant_matmul(y, *weight(width, gated), None, None, block=32))
    return b.build(y=y), {"x": rng.standard_normal((1, rows, width)).astype(half)}


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("kind", ["i4", "u8"])
def test_norm_and_gate_of_one_row_are_part_of_the_product(kind, norm):
    found = check(*gated_layer(kind, norm))
    assert found == [f"dequant_matmul_{kind}_row_gate", f"dequant_matmul_{kind}_row"]
    found = check(*gated_layer(kind, norm, rows=2))
    assert norm + "_bf16" in found and not any("row" in name for name in found)


def test_a_norm_that_others_read_keeps_its_kernel():
    b = bw.Builder("g")
    x = b.input("x", "f16[1, 32]")
    h = b.rms_norm(x, np.ones(32, np.float16))
    q, scale = b.constant(quantized("i8", 8, 32)), b.constant(np.full((8, 1), 0.01, np.float32))
    graph = b.build(y=b.dequant_matmul(h, q, scale, None, None, block=32), h=h)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 32)).astype(np.float16)}
    assert check(graph, feeds) == ["rms_norm_f16", "dequant_matmul_i8_row"]


@pytest.mark.parametrize("reads_both", [True, False])
def test_a_half_that_a_run_keeps_is_stored(reads_both):
    b = bw.Builder("g")
    q, scale = b.constant(quantized("i8", 16, 32)), b.constant(np.full((16, 1), 0.01, np.float32))
    y = b.dequant_matmul(b.input("x", "f32[1, 32]"), q, scale, None, None, block=32)
    gate, value = b.split(y, axis=-1, sizes=(8, 8))
    act = b.mul(gate, b.sigmoid(gate))
    graph = b.build(y=b.mul(act, value) if reads_both else act, value=value)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 32), np.float32)}
    assert check(graph, feeds)[0] == "dequant_matmul_i8_row"


def test_zero_points_that_are_floats_and_short_blocks():
    assert check(*product("u4", 2, 64, 16, 32, np.float32, zero="float"))[0].endswith("words")
    found = check(*product("u4", 2, 64, 16, 16, np.float32, zero="float"))
    assert found == ["matmul_f32"]


def test_any_number_of_rows():
    graph, feeds = product("i8", "n", 64, 17, 64, np.float16)
    check(graph, feeds)
    check(graph, {"x": feeds["x"][:1]})


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_inverted(kind):
    q = quantized(kind, 3, 70)
    packed = packing.pack(q, np.ones((3, 3), np.float32), None, 32)
    stored = packing.unpack(packed, 70)
    found = DTYPES[kind]
    if found.is_integer:
        signed = stored.view(np.int8) if not packed.is_narrow else stored.astype(np.int8)
        np.testing.assert_array_equal(signed.astype(int) - packed.offset, q.astype(int))
    else:
        np.testing.assert_array_equal(stored, q.view(np.uint8))


@pytest.mark.parametrize("size", [(7, 33, 17), (17, 64, 48), (3, 2048, 32)], ids=str)
def test_float8_products(size):
    rows, depth, columns = size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, depth)).astype(ml_dtypes.float8_e4m3fn)
    w = rng.standard_normal((depth, columns)).astype(ml_dtypes.float8_e4m3fn)
    b = bw.Builder("g")
    y = b.f8_matmul(b.input("x", f"f8e4m3fn[{rows}, {depth}]"), b.constant(w))
    # Hopper's tensor cores keep 13 bits of a partial sum of 128 terms
    rtol, atol = (2e-3, 2e-2) if torch.cuda.is_available() else (1e-4, 1e-3)
    check_graph(b.build(y=b.gelu(b.mul(y, np.float32(0.5)))), {"x": x}, rtol=rtol, atol=atol)
