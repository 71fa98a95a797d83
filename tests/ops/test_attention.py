"""Attention and rotary embeddings, against PyTorch, ONNX's evaluator and first principles."""

import numpy as np
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from single_op import evaluate, infer

from bitwright.errors import InferenceError, RunError

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def onnx_attention(*operands, **attrs):
    """The result by ONNX's evaluator."""
    names = ["q", "k", "v", "mask", "past_k", "past_v", "lengths"]
    given = [n if x is not None else "" for n, x in zip(names, operands, strict=False)]
    extra = ["pk", "pv"] if len(operands) > 4 and operands[4] is not None else []
    node = helper.make_node("Attention", given, ["y", *extra], **attrs)
    inputs = [helper.make_tensor_value_info(n, 1, None) for n in given if n]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    feeds = {n: x for n, x in zip(names, operands, strict=False) if x is not None}
    return ReferenceEvaluator(model).run(None, feeds)[0]


def equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mode", ["plain", "causal", "bool mask", "float mask"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 7), (7, 5), (1, 33)])
def test_agrees_with_torch(kv_heads, mode, queries, keys):
    q, k, v = normal(2, 4, queries, 8), normal(2, kv_heads, keys, 8), normal(2, kv_heads, keys, 3)
    mask = {"bool mask": RNG.random((2, 1, queries, keys)) > 0.3, "float mask": normal(4, 1, keys)}
    given = mask.get(mode)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (q, k, v)),
        attn_mask=None if given is None else torch.tensor(given),
        is_causal=mode == "causal",
        enable_gqa=True,
    )
    found = evaluate("attention", q, k, v, given, causal=mode == "causal")
    equal(found, torch.nan_to_num(expected).numpy())


@pytest.mark.parametrize(
    "attrs, onnx_attrs",
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": 1}),
        ({"causal": True, "window": 3}, {"is_causal": 1, "left_window_size": 2}),
        ({"window": 2, "window_right": 1}, {"left_window_size": 1, "right_window_size": 1}),
        ({"scale": 0.1, "softcap": 1.5}, {"scale": 0.1, "softcap": 1.5}),
    ],
)
@pytest.mark.parametrize("cache", ["none", "past", "lengths"])
def test_agrees_with_onnx(attrs, onnx_attrs, cache):
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 5)
    operands = [q, k, v, normal(3, 6)]
    if cache == "past":
        operands = [q, k, v, normal(3, 11), normal(2, 2, 5, 8), normal(2, 2, 5, 5)]
    elif cache == "lengths":
        operands += [None, None, np.array([2, 6])]
    equal(evaluate("attention", *operands, **attrs), onnx_attention(*operands, **onnx_attrs))


def test_causal_offset_end_aligns_the_last_query_with_the_last_key():
    q, k, v = normal(1, 1, 2, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 3)
    found = evaluate("attention", q, k, v, causal=True, causal_offset="end")
    equal(found[:, :, 1:], evaluate("attention", q[:, :, 1:], k, v))
    equal(found[:, :, :1], evaluate("attention", q[:, :, :1], k[:, :, :4], v[:, :, :4]))


def test_rows_without_a_key_are_zero():
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    found = evaluate("attention", q, k, v, mask)
    assert np.isfinite(found).all() and not found[:, :, 1].any() and found[:, :, 0].any()
    assert not evaluate("attention", q, k[:, :, :0], v[:, :, :0]).any()


def test_a_short_mask_hides_the_keys_beyond_it():
    q, k, v = normal(2, 1, 3, 4), normal(2, 1, 6, 4), normal(2, 1, 6, 4)
    mask = normal(2, 1, 3, 4)
    expected = evaluate("attention", q, k[:, :, :4], v[:, :, :4], mask)
    equal(evaluate("attention", q, k, v, mask), expected)
    equal(
        evaluate("attention", q, k, v, np.ones((2, 1, 3, 1), bool)), evaluate("attention", q, k, v)
    )


def test_a_masked_infinite_score_does_not_poison_the_row():
    q, k, v = normal(1, 1, 2, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    found = evaluate("attention", q, k, v, np.array([0, -np.inf, 0], np.float32), softcap=3.0)
    kept = [0, 2]
    equal(found, evaluate("attention", q, k[:, :, kept], v[:, :, kept], softcap=3.0))


def test_sizes_stay_symbolic():
    found = infer(
        "attention",
        "f32[batch, 8, seq, 64]",
        "f32[batch, 2, seq, 64]",
        "f32[batch, 2, seq, 32]",
        "f32[batch, 1, seq, past+seq]",
        "f32[batch, 2, past, 64]",
        "f32[batch, 2, past, 32]",
        causal=True,
    )
    assert str(found) == "f32[batch, 8, seq, 32]"


@pytest.mark.parametrize(
    "types, attrs, message",
    [
        (["f32[1, 4, 3, 8]", "f32[1, 3, 5, 8]", "f32[1, 3, 5, 8]"], {}, "evenly"),
        (["f32[1, 4, 3, 8]", "f32[1, 4, 5, 7]", "f32[1, 4, 5, 8]"], {}, "axis 3 of k"),
        (["f32[4, 3, 8]", "f32[4, 5, 8]", "f32[4, 5, 8]"], {}, "rank"),
        (["f32[1, 4, 3, 8]", "f32[1, 4, 5, 8]", "f32[1, 4, 5, 8]"], {"window": -1}, "negative"),
        (["f32[1, 4, 3, 8]"] * 3 + [None, "f32[1, 4, 2, 8]"], {}, "come together"),
        (["f32[1, 4, 3, 8]"] * 3 + ["f32[2, 3, 3]"], {}, "mask|broadcast"),
        (["f32[1, 4, 3, 8]"] * 3 + ["string[3]"], {}, "mask has the wrong element type"),
        (["f32[1, 4, 3, 8]"] * 6 + ["i64[1]"], {}, "exclude"),
    ],
)
def test_attention_faults(types, attrs, message):
    if len(types) == 7:
        types[3] = None
    with pytest.raises(InferenceError, match=message):
        infer("attention", *types, **attrs)


def rotated(x, angles, pairs):
    """x with pairs of features rotated as complex numbers."""
    result = x.astype(np.float64)
    for i, (a, b) in enumerate(pairs):
        value = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angles[..., i])
        result[..., a], result[..., b] = value.real, value.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 6])
def test_rotary_rotates_complex_pairs(interleaved, rotary_dim):
    size = rotary_dim or 8
    half = size // 2
    x, ids = normal(2, 3, 5, 8), RNG.integers(0, 9, (2, 5))
    table = RNG.uniform(-3, 3, (9, half))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = rotated(x, table[ids][:, None], pairs)
    cos, sin = np.cos(table).astype(np.float32), np.sin(table).astype(np.float32)
    attrs = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    equal(evaluate("rotary", x, cos, sin, ids, **attrs), expected)
    equal(evaluate("rotary", x, cos[ids], sin[ids], **attrs), expected)


def test_axial_rotary_rotates_by_row_and_by_column():
    rows, columns, quarter = 3, 5, 2
    x = normal(2, 4, rows * columns, 8)
    by_row, by_column = RNG.uniform(-3, 3, (rows, quarter)), RNG.uniform(-3, 3, (columns, quarter))
    tables = [f(t).astype(np.float32) for t in (by_row, by_column) for f in (np.cos, np.sin)]
    found = evaluate("axial_rotary", x, *tables).reshape(2, 4, rows, columns, 8)
    grid = x.reshape(2, 4, rows, columns, 8)
    expected = rotated(grid, by_row[:, None], [(0, 2), (1, 3)])
    expected = rotated(expected, by_column[None], [(4, 6), (5, 7)])
    equal(found, expected)


@pytest.mark.parametrize("rotary_dim", [3, 10, -2])
def test_a_rotary_dim_that_does_not_fit_is_an_error(rotary_dim):
    half = abs(rotary_dim) // 2
    with pytest.raises(InferenceError, match=f"even number up to 8, found {rotary_dim}"):
        types = "f32[1, 2, 5, 8]", f"f32[5, {half}]", f"f32[5, {half}]"
        infer("rotary", *types, rotary_dim=rotary_dim)


def test_odd_features_have_no_pairs():
    with pytest.raises(InferenceError, match="no pairs"):
        infer("rotary", "f32[1, 2, 5, 7]", "f32[5, 3]", "f32[5, 3]")


@pytest.mark.parametrize("position", [-1, 9])
def test_a_position_outside_the_table_is_an_error(position):
    x, table = normal(1, 1, 1, 4), normal(9, 2)
    with pytest.raises(RunError, match=f"0 to 8, found {position}"):
        evaluate("rotary", x, table, table, np.array([[position]]))
