"""Matmuls with dequantized constants become weight-only matmuls."""

import ml_dtypes
import numpy as np
import pytest

import bitwright as bw
from bitwright.lir.buffer import Storage
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.lower_integer.lower_weights import lower_weights
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.rewrite import Trace

rng = np.random.default_rng(0)
X = rng.normal(size=(3, 64)).astype(np.float32)


def i8(*shape):
    return rng.integers(-127, 127, shape).astype(np.int8)


def i4(*shape):
    return rng.integers(-8, 8, shape).astype(np.int8).astype(ml_dtypes.int4)


def positive(*shape):
    return rng.uniform(0.1, 1, shape).astype(np.float32)


def ops(graph):
    return [node.op for node in graph.nodes if not node.is_boundary]


def check(build, expected):
    """`build(b)` makes the weight; the product is the same, and its ops are those expected."""
    b = Builder("layer")
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 64]"), build(b)))
    trace = Trace()
    found = lower_weights(graph, trace)
    assert ops(found) == expected
    y = run(graph, {"x": X})["y"]
    scale = np.abs(y).max()
    np.testing.assert_allclose(run(found, {"x": X})["y"], y, atol=1e-5 * scale)
    np.testing.assert_allclose(bw.compile(graph).run({"x": X})["y"], y, atol=1e-5 * scale)
    return found, trace


def test_scales_per_column_block_or_tensor():
    check(lambda b: b.dequantize(b.constant(i8(64, 5)), positive(5), axis=1), ["dequant_matmul"])
    check(lambda b: b.dequantize(b.constant(i8(64, 5)), positive()), ["dequant_matmul"])
    zeros = np.arange(10, dtype=np.uint8).reshape(2, 5).astype(ml_dtypes.uint4)
    qvalues = rng.integers(0, 16, (64, 5)).astype(np.uint8).astype(ml_dtypes.uint4)
    check(
        lambda b: b.dequantize(b.constant(qvalues), positive(2, 5), zeros, axis=0, block=32),
        ["dequant_matmul"],
    )


def test_a_transposed_weight_needs_no_other_layout():
    qvalues = i4(5, 64)

    def weight(b):
        w = b.dequantize(b.constant(qvalues), positive(5, 2), axis=1, block=32)
        return b.transpose(w, perm=(1, 0))

    found, _ = check(weight, ["dequant_matmul"])
    (node,) = (n for n in found.nodes if n.op == "dequant_matmul")
    assert node.attrs["block"] == 32 and node.inputs[1].shape == (5, 64)


def test_quantized_scales_keep_their_own_scale():
    qvalues = rng.normal(size=(64, 5)).astype(ml_dtypes.float4_e2m1fn)
    narrow = rng.uniform(1, 400, (4, 5)).astype(ml_dtypes.float8_e4m3fn)

    def weight(b):
        scales = b.dequantize(b.constant(narrow), np.float32(0.01))
        return b.dequantize(b.constant(qvalues), scales, axis=0, block=16)

    check(weight, ["dequant_matmul", "mul"])


@pytest.mark.parametrize(
    "build, reason",
    [
        (lambda b: b.dequantize(b.constant(i8(64, 5)), positive(64), axis=0), "another axis"),
        (
            lambda b: b.dequantize(b.constant(i8(64, 6)), positive(64, 2), axis=1, block=3),
            "another axis",
        ),
        (
            lambda b: b.dequantize(b.constant(i8(64, 5).astype(np.int16)), positive(5), axis=1),
            "dequantized from i16",
        ),
        (lambda b: b.input("w", "f32[64, 5]"), "not a dequantized matrix"),
    ],
)
def test_what_stays_float_has_a_reason(build, reason):
    b = Builder("layer")
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 64]"), build(b)))
    trace = Trace()
    assert "matmul" in ops(lower_weights(graph, trace))
    assert any(reason in event.reason for event in trace.events)


def test_quantized_projections_become_one():
    b = Builder("qkv")
    x = b.input("x", "f32[n, 64]")
    parts = [
        b.matmul(x, b.dequantize(b.constant(i4(64, n)), positive(2, n), axis=0, block=32))
        for n in (8, 4, 6)
    ]
    graph = b.build(*(b.transpose(p, perm=(1, 0)) for p in parts))
    found = merge_projections(lower_weights(graph, Trace()), Trace())
    assert ops(found).count("dequant_matmul") == 1
    for one, other in zip(
        run(graph, {"x": X}).values(), run(found, {"x": X}).values(), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


def test_half_inputs_and_dynamic_weights():
    b = Builder("layer")
    x, q = b.input("x", "f16[n, 64]"), b.input("q", "i8[5, 64]")
    bias = b.constant(positive(5).astype(np.float16))
    scale = positive(5, 2).astype(np.float16)
    y = b.dequant_matmul(x, b.constant(i4(5, 64)), scale, None, bias, block=32)
    z = b.dequant_matmul(x, q, positive(5, 1), block=64)
    graph = b.build(y=y, z=z)
    feeds = {"x": X.astype(np.float16), "q": i8(5, 64)}
    expected, exe = run(graph, feeds), bw.compile(graph)
    for name, found in exe.run(feeds).items():
        wide = expected[name].astype(np.float32)
        np.testing.assert_allclose(found.astype(np.float32), wide, atol=2e-3 * np.abs(wide).max())
    assert not list(exe.engine.schedule.fallbacks)


def test_a_compiled_model_holds_quantized_weights():
    b = Builder("layer")
    w = b.dequantize(b.constant(i4(1024, 768)), positive(32, 768), axis=0, block=32)
    exe = bw.compile(b.build(y=b.matmul(b.input("x", "f32[n, 1024]"), w)))
    buffers = exe.engine.schedule.buffers
    held = sum(buffer.array.nbytes for buffer in buffers if buffer.storage is Storage.CONSTANT)
    assert held <= 1024 * 768 // 2 + 32 * 768 * 4


@pytest.mark.parametrize("op", ["matmul", "grouped_matmul"])
def test_batched_weights_are_dequantized_at_compile_time(op, monkeypatch):
    """No kernel reads them quantized, and dequantizing them in every run costs far more."""
    monkeypatch.setenv("BITWRIGHT_FOLD_LIMIT", "8")
    rng = np.random.default_rng(0)
    b = Builder("several")
    qvalues = rng.integers(-127, 128, (3, 16, 8)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (3, 1, 8)).astype(np.float32)
    w = b.dequantize(qvalues, scale, axis=1, block=16)
    x = b.input("x", "f32[n, 16]")
    counts = [np.array([2, 0, 3])] if op == "grouped_matmul" else []
    graph = b.build(y=b.op(op, x, w, *counts))
    made = run_passes(graph, (*INFERENCE, lower_weights))
    (product,) = (node for node in made.nodes if node.op == op)
    assert product.inputs[1].is_constant
    feeds = {"x": rng.normal(size=(5, 16)).astype(np.float32)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(graph, feeds)["y"], rtol=1e-5, atol=1e-5)


def test_a_transposed_embedding_is_read_quantized(monkeypatch):
    """The weight of a head that is tied to its embedding, also where it is too large to fold."""
    monkeypatch.setenv("BITWRIGHT_FOLD_LIMIT", "8")
    rng = np.random.default_rng(0)
    b = Builder("tied")
    qvalues = b.constant(rng.integers(-127, 128, (24, 16)).astype(np.int8))
    transposed = b.transpose(qvalues, perm=(1, 0))
    scale = rng.uniform(0.01, 0.1, 24).astype(np.float32)
    graph = b.build(
        y=b.matmul(b.input("x", "f32[n, 16]"), b.dequantize(transposed, scale, axis=1)),
        rows=b.gather(qvalues, b.input("ids", "i64[n]"), axis=0),
    )
    made = run_passes(graph, (*INFERENCE, lower_weights))
    assert "dequant_matmul" in {node.op for node in made.nodes}
    feeds = {"x": rng.normal(size=(5, 16)).astype(np.float32), "ids": np.arange(5)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(graph, feeds)["y"], rtol=1e-4, atol=1e-4)
