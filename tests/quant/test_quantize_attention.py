"""Int8 attention: chosen by output error, asked for, or left in float."""

from functools import partial

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run as interpret


def layer(rng, features=16, heads=2, causal=False):
    """Projections, attention, a projection."""
    b = Builder("layer")
    width = heads * features
    x = b.input("x", f"f32[1, n, {width}]")
    weights = [rng.normal(size=(width, width)).astype(np.float32) / 4 for _ in range(4)]
    parts = [b.matmul(x, w) for w in weights[:3]]
    shape = (1, x.shape[1], heads, features)
    q, k, v = (b.transpose(b.reshape(p, shape=shape), perm=(0, 2, 1, 3)) for p in parts)
    y = b.transpose(b.attention(q, k, v, causal=causal, name="attention"), perm=(0, 2, 1, 3))
    return b.build(y=b.matmul(b.reshape(y, shape=(1, x.shape[1], width)), weights[3]))


def quantized(recipe, tokens=40, causal=False):
    rng = np.random.default_rng(2)
    graph = layer(rng, causal=causal)
    data = [{"x": rng.normal(size=(1, tokens, 32)).astype(np.float32)} for _ in range(4)]
    return bw.quantize(graph, data, recipe), data, graph


def attention_of(graph):
    (node,) = [node for node in graph.nodes if node.op == "attention"]
    return node


def test_int8_is_chosen_by_output_error():
    q, data, graph = quantized({})
    assert attention_of(q.graph).attrs["int8"]
    (row,) = [x for x in q.report.layers if x.op == "attention"]
    assert row.scheme == "dynamic_per_token" and "dB of the outputs" in row.reason
    assert q.report.int8_mac_fraction == 1.0
    exact, found = (bw.compile(g).run(data[0])["y"] for g in (graph, q.graph))
    assert np.square(found - exact).sum() < np.square(exact).sum() / 100


def test_a_large_output_error_leaves_it_in_float():
    q, _, _ = quantized({"attention_sqnr_db": 90.0})
    assert not attention_of(q.graph).attrs.get("int8")
    (row,) = [x for x in q.report.layers if x.op == "attention"]
    assert row.scheme == "float" and "less than the recipe requires" in row.reason


@pytest.mark.parametrize(
    "recipe, tokens, int8, reason",
    [
        ({"attention": "float"}, 40, False, "the recipe leaves it in float"),
        ({"ignore": "attention"}, 40, False, "the recipe leaves it in float"),
        ({}, 9, False, "9 queries and 9 keys are too few"),
        ({"attention": "int8"}, 9, True, "dB of the outputs"),
        ({"base": "w8"}, 40, False, "weights only"),
        ({"base": "int8-static"}, 40, False, "which the recipe does not allow"),
    ],
)
def test_the_recipe_decides(recipe, tokens, int8, reason):
    q, _, _ = quantized(recipe, tokens)
    assert bool(attention_of(q.graph).attrs.get("int8")) == int8
    (row,) = [x for x in q.report.layers if x.op == "attention"]
    assert reason in row.reason


def test_a_token_does_not_depend_on_later_ones():
    q, data, _ = quantized({}, causal=True)
    assert attention_of(q.graph).attrs["int8"]
    batch = dict(data[0])
    ((name, x),) = batch.items()
    later = x.copy()
    later[:, 25:] *= np.float32(-30)
    for run in (bw.compile(q.graph).run, partial(interpret, q.graph)):
        one, other = (np.asarray(run({name: given})["y"]) for given in (x, later))
        np.testing.assert_array_equal(one[:, :25], other[:, :25])
        assert (one[:, 25:] != other[:, 25:]).any()


def test_an_unknown_mode_is_an_error():
    with pytest.raises(BitwrightError, match="no attention mode 'int4'"):
        quantized({"attention": "int4"})


def test_the_saved_model_keeps_it(tmp_path):
    q, data, _ = quantized({})
    q.save(tmp_path / "model.onnx")
    again = bw.load(tmp_path / "model.onnx")
    assert attention_of(again).attrs["int8"]
    expected, found = (bw.compile(g).run(data[0])["y"] for g in (q.graph, again))
    assert np.square(found - expected).sum() <= 1e-4 * np.square(expected).sum()
