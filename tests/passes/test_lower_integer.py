"""Q/DQ graphs become integer operators whose results agree within one scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.rewrite.trace import Trace

RNG = np.random.default_rng(0)


def lowered(graph: Graph) -> tuple[Graph, list[str], str]:
    """The lowered graph, its ops, and what was refused."""
    trace = Trace()
    found = canonicalize(lower_integer(canonicalize(graph, Trace()), trace), Trace())
    refused = "\n".join(map(str, trace.events))
    return found, [n.op for n in found.nodes if not n.is_boundary], refused


def parameters(b: Builder, scale: float, zero: int | None, kind: str = "u8") -> list[Any]:
    element = {"u8": np.uint8, "i8": np.int8}[kind]
    number = None if zero is None else b.constant(np.array(zero, element))
    return [b.constant(np.float32(scale)), number]


def through(b: Builder, x: Any, scale: float, zero: int | None, kind: str = "u8") -> Any:
    """dequantize(quantize(x))"""
    p = parameters(b, scale, zero, kind)
    return b.dequantize(b.quantize(x, *p, to=kind), *p)


def weight(b: Builder, *shape: int, axis: int | None = None) -> Any:
    qvalues = RNG.integers(-127, 128, shape).astype(np.int8)
    scale = RNG.uniform(0.001, 0.003, () if axis is None else shape[axis]).astype(np.float32)
    return b.dequantize(b.constant(qvalues), b.constant(scale), axis=axis)


def check(graph: Graph, scale: float, **feeds: Any) -> tuple[list[str], str]:
    """Checks that both graphs agree within one scale; returns the ops of the lowered one."""
    found, ops, refused = lowered(graph)
    (want,), (got,) = run(graph, feeds).values(), run(found, feeds).values()
    assert np.abs(want.astype(np.float64) - got.astype(np.float64)).max() <= scale * 1.001
    return ops, refused


def x_of(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kind, zero", [("u8", 120), ("i8", -3), ("i8", None)])
def test_a_layer_with_quantized_input_and_output(kind: str, zero: int | None) -> None:
    b = Builder("layer")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, zero, kind)
    bias = b.constant(x_of(32))
    y = b.relu(b.add(b.matmul(x, weight(b, 64, 32, axis=1)), bias))
    y = through(b, y, 0.01, 0)
    ops, _ = check(b.build(y), 0.01, x=x_of(5, 64))
    assert ops == ["quantize", "integer_matmul", "cast", "mul", "requantize", "dequantize"]


def test_a_float_result_keeps_its_activation() -> None:
    b = Builder("layer")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 128)
    w = b.transpose(weight(b, 32, 64, axis=0), perm=(1, 0))
    ops, _ = check(b.build(b.gelu(b.matmul(x, w))), 1e-5, x=x_of(5, 64))
    assert ops == ["quantize", "integer_matmul", "cast", "mul", "gelu"]


def test_residuals_keep_their_own_scale() -> None:
    b = Builder("block")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 120)
    y = through(b, b.add(b.matmul(x, weight(b, 64, 64)), x), 0.03, 99)
    ops, _ = check(b.build(y), 0.03, x=x_of(7, 64))
    assert "integer_matmul" in ops and ops.count("quantize") == 1
    assert ops.count("requantize") == 1 and ops.count("dequantize") == 1  # only the result


def test_convolutions_take_a_quantized_bias() -> None:
    b = Builder("conv")
    x = through(b, b.input("x", "f32[n, 3, 9, 9]"), 0.02, 120)
    w = weight(b, 8, 3, 3, 3, axis=0)
    qvalues = b.constant(RNG.integers(-500, 500, 8).astype(np.int32))
    bias = b.dequantize(qvalues, b.constant(np.full(8, 4e-5, np.float32)), axis=0)
    y = b.clip(b.conv(x, w, bias, pads=(1, 1, 1, 1), strides=(2, 2)), 0.0, 6.0)
    y = b.max_pool(through(b, y, 0.02, 0), kernel=(2, 2))
    ops, _ = check(b.build(through(b, y, 0.02, 0)), 0.02, x=x_of(2, 3, 9, 9))
    assert "integer_conv" in ops and "conv" not in ops
    assert ops[-2:] == ["max_pool", "dequantize"]


def test_layouts_move_quantized_values() -> None:
    b = Builder("moves")
    x = through(b, b.input("x", "f32[4, 6]"), 0.02, 120)
    y = b.reshape(b.transpose(x, perm=(1, 0)), shape=(3, 8))
    ops, _ = check(b.build(b.matmul(y, weight(b, 8, 5))), 1e-5, x=x_of(4, 6))
    assert ops == ["quantize", "transpose", "reshape", "integer_matmul", "cast", "mul"]


def test_an_embedding_gathers_quantized_values() -> None:
    b = Builder("embedding")
    y = b.gather(weight(b, 50, 8), b.input("ids", "i64[n]"), axis=0)
    ops, _ = check(b.build(y), 0, ids=np.array([3, 49, 0]))
    assert ops == ["gather", "dequantize"]


@pytest.mark.parametrize("per_token", [True, False])
def test_dynamic_scales(per_token: bool) -> None:
    b = Builder("dynamic")
    x = b.input("x", "f32[2, 5, 64]")
    qvalues, scale, zero = b.dynamic_quantize(x, to="u8", per_token=per_token)
    attrs = {"axis": 2, "block": 64} if per_token else {}
    y = b.matmul(b.dequantize(qvalues, scale, zero, **attrs), weight(b, 64, 32, axis=1))
    ops, _ = check(b.build(b.add(y, b.constant(x_of(32)))), 1e-5, x=x_of(2, 5, 64))
    assert "integer_matmul" in ops and "matmul" not in ops and "dequantize" not in ops


@pytest.mark.parametrize("low", [-100, -200])
def test_i32_products_of_importers(low: int) -> None:
    b = Builder("product")
    x, zero = b.input("x", "u8[3, 7]"), b.input("zero", "u8[]")
    rows = b.sub(b.cast(x, to="i32"), b.cast(zero, to="i32"))
    w = RNG.integers(low, low + 256, (7, 5)).astype(np.int32)
    feeds = {"x": RNG.integers(0, 256, (3, 7)).astype(np.uint8), "zero": np.uint8(9)}
    ops, _ = check(b.build(b.matmul(rows, b.constant(w))), 0, **feeds)
    assert ops == ["integer_matmul"]


@pytest.mark.parametrize("kind, zeros", [("i8", None), ("i8", [3, -4]), ("u8", [200, 0])])
def test_i32_weights_too_large_to_fold_are_still_matched(
    kind: str, zeros: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITWRIGHT_FOLD_LIMIT", "100")
    b = Builder("product")
    x, zero = b.input("x", "u8[3, 2500]"), b.input("zero", "u8[]")
    rows = b.sub(b.cast(x, to="i32"), b.cast(zero, to="i32"))
    w = b.cast(b.constant(RNG.integers(0, 128, (2500, 2)).astype(dtype(kind).numpy)), to="i32")
    if zeros is not None:
        w = b.sub(w, b.constant(np.array([zeros], np.int32)))
    feeds = {"x": RNG.integers(0, 256, (3, 2500)).astype(np.uint8), "zero": np.uint8(9)}
    ops, _ = check(b.build(b.matmul(rows, w)), 0, **feeds)
    assert ops == ["integer_matmul"]


def test_sums_that_could_overflow_stay_float() -> None:
    b = Builder("deep")
    x = through(b, b.input("x", "f32[1, 140000]"), 0.02, 0)
    qvalues = b.constant(np.full((140000, 2), 127, np.int8))
    y = b.matmul(x, b.dequantize(qvalues, b.constant(np.float32(0.01))))
    _, ops, refused = lowered(b.build(y))
    assert "matmul" in ops and "its sums may reach 4533900000, beyond 32 bits" in refused


def test_products_that_stay_float_have_a_reason() -> None:
    b = Builder("reasons")
    x = b.input("x", "f32[4, 8]")
    plain = b.matmul(x, weight(b, 8, 5))
    other = b.matmul(through(b, x, 0.1, 3), weight(b, 8, 5, axis=0))
    free = b.matmul(through(b, x, 0.1, 3), b.input("w", "f32[8, 5]"))
    _, ops, refused = lowered(b.build(plain, other, free))
    assert ops.count("matmul") == 3
    assert "%x is not a dequantized value" in refused
    assert "scales along another axis than the output channels" in refused
    assert "%w is not a dequantized value" in refused


def test_requantize_behind_a_function_of_a_product() -> None:
    b = Builder("layer")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 128)
    y = through(b, b.gelu(b.matmul(x, weight(b, 64, 32))), 0.02, 7)
    ops, _ = check(b.build(y), 0.02, x=x_of(5, 64))
    assert ops[1:] == ["integer_matmul", "cast", "mul", "gelu", "mul", "requantize", "dequantize"]


@pytest.mark.parametrize(
    "x, w, groups", [((1, 2, 3, 4, 5), (2, 2, 1, 1, 1), 1), ((1, 2, 20, 20), (2, 1, 17, 17), 2)]
)
def test_convolutions_without_a_kernel_stay_float(x: Any, w: Any, groups: int) -> None:
    b = Builder("conv")
    image = through(b, b.input("x", f"f32{list(x)}"), 0.02, 128)
    _, ops, _ = lowered(b.build(b.conv(image, weight(b, *w), groups=groups)))
    assert "conv" in ops and "integer_conv" not in ops


@pytest.mark.parametrize("zero, scale, ops", [(0, 0.02, []), (0, 0.05, []), (3, 0.05, ["clip"])])
def test_clips_and_factors_per_channel_join_the_requantize(
    zero: int, scale: float, ops: list[str]
) -> None:
    b = Builder("smoothed")
    x = through(b, b.input("x", "f32[n, 8, 5, 5]"), 0.02, 120)
    factors = b.constant(RNG.uniform(0.3, 3, (8, 1, 1)).astype(np.float32))
    y = b.mul(b.clip(b.conv(x, weight(b, 8, 8, 3, 3, axis=0)), 0.0, 3.0), factors)
    found, _ = check(b.build(through(b, y, scale, zero)), scale, x=3 * x_of(2, 8, 5, 5))
    assert found[1:] == ["integer_conv", "cast", "mul", *ops, "requantize", "dequantize"]


@pytest.mark.parametrize("op, gates", [("rnn", 1), ("gru", 3), ("lstm", 4)])
@pytest.mark.parametrize("rows", [False, True])
def test_recurrent_layers_multiply_quantized_values(op: str, gates: int, rows: bool) -> None:
    b = Builder(op)
    x = b.input("x", "f32[5, n, 12]")
    if rows:
        qvalues, scale, zero = b.dynamic_quantize(x, to="u8", per_token=True)
        x = b.dequantize(qvalues, scale, zero, axis=-1, block=12)
    else:
        x = through(b, x, 0.03, 128)
    w = b.reshape(weight(b, 2 * gates * 8, 12, axis=0), shape=(2, gates * 8, 12))
    r = b.reshape(weight(b, 2 * gates * 8, 8, axis=0), shape=(2, gates * 8, 8))
    node = b.node(op, [x, w, r], {"direction": "bidirectional"}, [])
    ops, _ = check(b.build(node.outputs[0]), 0.02, x=x_of(5, 3, 12))
    assert "integer_matmul" in ops and f"integer_{op}" in ops and op not in ops


def test_a_weight_only_recurrent_layer_stays() -> None:
    b = Builder("lstm")
    x = b.input("x", "f32[5, n, 12]")
    scaled = [
        b.dequantize(
            b.constant(RNG.integers(-127, 128, (1, 32, k)).astype(np.int8)),
            b.constant(np.full(32, 0.002, np.float32)),
            axis=1,
        )
        for k in (12, 8)
    ]
    node = b.node("lstm", [x, *scaled], {}, [])
    ops, refused = check(b.build(node.outputs[0]), 1e-5, x=x_of(5, 3, 12))
    assert "lstm" in ops and "is not a dequantized value" in refused


def test_functions_of_quantized_values_become_lookup_tables() -> None:
    b = Builder("functions")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 120)
    y = through(b, b.mul(x, b.sigmoid(b.mul(x, np.float32(1.7)))), 0.013, 11)  # swish
    y = through(b, y, 0.02, -5, "i8")  # another scale: merged with the table before
    ops, _ = check(b.build(y), 0, x=2 * x_of(5, 64))
    assert ops == ["quantize", "lookup_table", "dequantize"]


@pytest.mark.parametrize("function", ["hard_swish", "tanh"])
def test_cheap_functions_stay_in_the_epilogue(function: str) -> None:
    b = Builder("layer")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 120)
    y = through(b, b.matmul(x, weight(b, 64, 32)), 0.03, 128)
    y = through(b, getattr(b, function)(y), 0.02, 120)
    ops, _ = check(b.build(y), 0.02, x=x_of(5, 64))
    is_cheap = function == "hard_swish"
    assert ops[-2] == ("requantize" if is_cheap else "lookup_table")
    assert ops.count("requantize") == (2 if is_cheap else 1)


def test_quantized_values_with_equal_parameters_are_concatenated() -> None:
    b = Builder("concat")
    x = through(b, b.input("x", "f32[2, 8, 5, 5]"), 0.02, 120)
    y = b.concat(x, b.slice(x, starts=[0], stops=[3], steps=[1], axes=[1]), axis=1)
    ops, _ = check(b.build(y), 0, x=x_of(2, 8, 5, 5))
    assert ops == ["quantize", "slice", "concat", "dequantize"]


def test_quantize_goes_before_concat() -> None:
    b = Builder("concat")
    x = through(b, b.input("x", "f32[2, 8, 5, 5]"), 0.02, 120)
    parts = [b.relu(b.conv(x, weight(b, n, 8, 1, 1))) for n in (4, 6)]
    y = through(b, b.concat(*parts, axis=1), 0.02, 0)
    ops, _ = check(b.build(y), 0.02, x=x_of(2, 8, 5, 5))
    assert ops.count("requantize") == 2 and ops[-2:] == ["concat", "dequantize"]


def test_quantize_goes_before_movement_of_a_product() -> None:
    b = Builder("moves")
    x = through(b, b.input("x", "f32[2, 8, 6, 6]"), 0.02, 120)
    y = b.max_pool(b.relu(b.conv(x, weight(b, 4, 8, 3, 3))), kernel=(2, 2), strides=(2, 2))
    y = b.reshape(b.transpose(y, perm=(0, 2, 3, 1)), shape=(8, 4))
    ops, _ = check(b.build(through(b, y, 0.02, 0)), 0.02, x=x_of(2, 8, 6, 6))
    wanted = ["requantize", "max_pool", "transpose", "reshape", "dequantize"]
    assert ops == ["quantize", "integer_conv", "cast", "mul", *wanted]


def test_the_division_joins_constants_behind_a_function() -> None:
    b = Builder("layer")
    x = through(b, b.input("x", "f32[n, 64]"), 0.02, 128)
    y = b.hard_swish(b.matmul(x, weight(b, 64, 32)))
    y = b.add(b.mul(y, np.float32(1.3)), b.constant(x_of(32)))
    graph = b.build(through(b, y, 0.02, 7))
    ops, _ = check(graph, 0.02, x=x_of(5, 64))
    wanted = ["integer_matmul", "cast", "mul", "hard_swish", "mul", "add", "requantize"]
    assert ops == ["quantize", *wanted, "dequantize"]
    last = next(node for node in lowered(graph)[0].nodes if node.op == "requantize")
    assert last.attrs["bounded"]


def test_a_product_with_row_scales_keeps_its_rounding() -> None:
    b = Builder("dynamic")
    qvalues, scale, zero = b.dynamic_quantize(b.input("x", "f32[5, 64]"), to="u8", per_token=True)
    x = b.dequantize(qvalues, scale, zero, axis=1, block=64)
    y = b.add(b.matmul(x, weight(b, 64, 32, axis=1)), b.constant(x_of(32)))
    y = b.mul(b.clip(y, 0.0, 6.0), b.constant(RNG.uniform(0.5, 2, 32).astype(np.float32)))
    ops, _ = check(b.build(through(b, y, 0.02, 0)), 0.02, x=x_of(5, 64))
    wanted = ["integer_matmul", "cast", "mul", "mul", "add", "mul", "requantize", "dequantize"]
    assert ops == ["dynamic_quantize", *wanted]


def test_a_float_product_is_requantized_without_a_division() -> None:
    b = Builder("float")
    x, w = b.input("x", "f32[2, 3, 9, 9]"), b.constant(x_of(8, 3, 3, 3))
    y = through(b, b.clip(b.conv(x, w), 0.0, 6.0), 0.02, 0)
    ops, _ = check(b.build(y), 0.02, x=x_of(2, 3, 9, 9))
    assert ops == ["conv", "mul", "requantize", "dequantize"]
