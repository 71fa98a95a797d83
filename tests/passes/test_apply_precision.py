"""Precision policies: the table kind by kind, what changes type, and what must never."""

import ml_dtypes
import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.ops.core.opdef import Kind
from bitwright.passes.precision.plan import Extent, largest_magnitude
from bitwright.passes.precision.policy import custom, kind_of, policy
from bitwright.rewrite.trace import Trace

TABLE = {  # compute, reduction, elementwise, movement
    "f32": "f32 f32 f32 f32",
    "f16": "f16 f16 f16 f16",
    "mixed_conservative": "f16 f32 f16 f16",
    "mixed": "f16 f16 f16 f16",
    "mixed_bf16": "bf16 bf16 bf16 bf16",
    "custom:compute=bf16": "bf16 f32 f32 f32",
}
KINDS = (Kind.COMPUTE, Kind.REDUCTION, Kind.ELEMENTWISE, Kind.MOVEMENT)
OPS = {
    Kind.COMPUTE: "matmul conv attention solve fft lstm gru rnn custom fallback "
    "conv_transpose einsum",
    Kind.REDUCTION: "layer_norm rms_norm group_norm softmax log_softmax reduce_sum reduce_mean "
    "avg_pool cumsum sample selective_scan cross_entropy",
    Kind.ELEMENTWISE: "relu gelu add mul eq where quantize dequantize complex sigmoid",
    Kind.MOVEMENT: "gather slice reshape transpose concat expand cast rotary max_pool top_k "
    "scatter_nd resize if loop scan",
    Kind.BOUNDARY: "input parameter constant state",
}


def types(graph):
    return {v.name: str(v.type.dtype) for n in graph.nodes for v in n.outputs}


def reference(graph, **feeds):
    return bw.compile(graph, target="reference").run(feeds)


def reasons(graph, given, extents=None):
    trace = Trace()
    changed = bw.apply_precision(graph, given, extents, trace)
    return changed, {e.node: e.reason for e in trace.events if not e.fired}


def each_kind():
    """One op of each kind behind the next."""
    b = bw.Builder("kinds")
    x = b.input("x", "f32[4, 4]")
    w = b.parameter("w", np.eye(4, dtype=np.float32))
    y = b.matmul(x, w, name="compute")
    y = b.softmax(y, axis=-1, name="reduction")
    y = b.sigmoid(y, name="elementwise")
    return b.build(y=b.transpose(y, perm=(1, 0), name="movement"))


@pytest.mark.parametrize("kind", OPS)
def test_kinds_of_ops(kind):
    assert {op: kind_of(op) for op in OPS[kind].split()} == dict.fromkeys(OPS[kind].split(), kind)


@pytest.mark.parametrize("name", TABLE)
def test_the_policy_table_kind_by_kind(name):
    chosen = policy(name)
    assert [str(chosen.of_kind(kind)) for kind in KINDS] == TABLE[name].split()
    assert chosen.of_kind(Kind.BOUNDARY) is None
    found = types(bw.apply_precision(each_kind(), name))
    assert [found[kind.value] for kind in KINDS] == TABLE[name].split()
    assert found["x"] == found["w"] == "f32"


@pytest.mark.parametrize("name", TABLE)
def test_a_second_time_changes_nothing_and_outputs_keep_their_types(name):
    once = bw.apply_precision(each_kind(), name)
    assert str(bw.apply_precision(once, name)) == str(once)
    assert [(n, str(v.dtype)) for n, v in once.outputs] == [("y", "f32")]
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    expected = reference(each_kind(), x=x)["y"]
    assert np.abs(reference(once, x=x)["y"] - expected).max() < 5e-3


def test_names_patterns_and_layers_override_kinds():
    chosen = custom(
        {"compute": "bf16", "elementwise": "f16"},
        ops={"sig*": "f32"},
        layers={"movement": "bf16"},
    )
    assert policy(str(chosen)) == chosen
    found = types(bw.apply_precision(each_kind(), chosen))
    assert [found[kind.value] for kind in KINDS] == ["bf16", "f32", "f32", "bf16"]
    assert policy({"kinds": {"compute": "f16"}}).of_kind(Kind.COMPUTE).name == "f16"
    assert policy("mixed:op:softmax=f32").of_kind(Kind.REDUCTION).name == "f16"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("mixd", "no precision 'mixd'"),
        ("mixed:compute", "gives no precision"),
        ("mixed:compute=f8", "is not a precision"),
        ("mixed:comput=f16", "no op kind 'comput'"),
        ({"kind": {}}, "no part 'kind'"),
    ],
)
def test_errors_of_policies(given, text):
    with pytest.raises(BitwrightError, match=text):
        policy(given)
    with pytest.raises(BitwrightError, match=text):
        bw.compile(each_kind(), precision=given)


def test_casts_are_made_once_per_value_and_pairs_cancel():
    b = bw.Builder("shared")
    x, w = b.input("x", "f32[2, 2]"), b.parameter("w", np.ones((2, 2), np.float32))
    one = b.matmul(x, w)
    two = b.matmul(b.cast(b.cast(one, to="f16"), to="f32"), w)
    graph = bw.apply_precision(b.build(one, two), "mixed")
    casts = [node for node in graph.nodes if node.op == "cast"]
    assert len(casts) == 4  # x, w, and both results back


def test_a_parameter_that_two_ops_share_is_stored_and_cast_once():
    b = bw.Builder("tied")
    table = b.parameter("table", np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32))
    x = b.gather(table, b.input("ids", "i64[3]"), axis=0)
    graph = b.build(y=b.matmul(x, b.transpose(table, perm=(1, 0))))
    changed = bw.apply_precision(graph, "mixed_bf16")
    assert sum(node.op == "cast" and node.inputs[0].name == "table" for node in changed.nodes) == 1
    exe = bw.compile(changed)
    arrays = [n.attrs["value"] for n in exe.graph.nodes if n.op == "constant"]
    assert {str(a.dtype) for a in arrays if a.size == 36} == {"bfloat16"}


def test_ids_above_2048_reach_their_embedding():
    b = bw.Builder("ids")
    table = np.arange(6000, dtype=np.float32).reshape(3000, 2) / 6000
    ids = b.input("ids", "i64[4]")
    through_floats = b.cast(b.add(b.cast(ids, to="f32"), 1.0), to="i64")
    y = b.gather(b.parameter("table", table), ids, axis=0, name="y")
    z = b.gather(b.parameter("same", table), through_floats, axis=0, name="z")
    for name in ("f16", "mixed_bf16"):
        graph = bw.apply_precision(b.build() if b.outputs else b.build(y, z), name)
        found = reference(graph, ids=np.array([2049, 2051, 2997, 5]))
        rows = np.array([2049, 2051, 2997, 5])
        assert np.abs(found["y"] - table[rows]).max() < 4e-3
        assert np.abs(found["z"] - table[rows + 1]).max() < 4e-3
        assert types(graph)["y"] != "f32"


def test_positions_stay_exact_until_a_function_of_them():
    b = bw.Builder("positions")
    position = b.cast(b.input("ids", "i64[5, 1]"), to="f32")
    angle = b.matmul(position, b.parameter("inverse", np.full((1, 3), 0.01, np.float32)))
    graph = b.build(y=b.mul(b.sin(angle, name="sine"), 0.5, name="scaled"))
    changed, said = reasons(graph, "mixed_bf16")
    assert types(changed)["sine"] == "f32" and types(changed)["scaled"] == "bf16"
    assert "integers" in said["sine"]
    ids = np.array([[3], [257], [2049], [4097], [65535]])
    expected = 0.5 * np.sin(ids * np.float64(np.float32(0.01)))
    assert np.abs(reference(changed, ids=ids)["y"] - expected).max() < 5e-3


@pytest.mark.parametrize("name", ["f16", "mixed", "mixed_bf16"])
def test_masks_do_not_become_infinite(name):
    b = bw.Builder("mask")
    scores, keep = b.input("scores", "f32[2, 4]"), b.input("keep", "i64[2, 4]")
    lowest = float(np.finfo(np.float32).min)
    hidden = b.mul(b.sub(b.constant(np.float32(1)), b.cast(keep, to="f32")), lowest)
    visible = b.input("visible", "bool[2, 4]")
    masked = b.where(visible, b.add(scores, hidden), lowest)
    graph = bw.apply_precision(b.build(y=b.softmax(masked, axis=-1)), name)
    keep_ = np.array([[1, 1, 0, 0], [0, 0, 0, 0]])
    found = reference(graph, scores=np.ones((2, 4), np.float32), keep=keep_, visible=keep_ > -1)
    assert np.isfinite(found["y"]).all()
    np.testing.assert_allclose(found["y"][0], [0.5, 0.5, 0, 0])


def test_a_constant_that_would_become_zero_keeps_its_op_wide():
    b = bw.Builder("epsilon")
    x = b.input("x", "f32[3]")
    graph = b.build(y=b.div(x, b.add(b.abs(x), 1e-12), name="ratio"))
    changed, said = reasons(graph, "f16")
    assert "would underflow to zero" in said["add"]
    assert np.isfinite(reference(changed, x=np.zeros(3, np.float32))["y"]).all()


def test_quantized_values_and_their_scales_stay():
    b = bw.Builder("quantized")
    x = b.input("x", "f32[2, 4]")
    scale = b.constant(np.float32(0.0123456789), name="scale")
    qvalues = b.quantize(x, scale, to="i8", name="q")
    w = b.constant(np.ones((4, 3), np.int8), name="w")
    weight = b.dequantize(w, scale, name="weight")
    graph = b.build(y=b.matmul(b.dequantize(qvalues, scale, name="back"), weight))
    found = types(bw.apply_precision(graph, "mixed_bf16"))
    assert (found["q"], found["w"], found["scale"]) == ("i8", "i8", "f32")
    assert found["back"] == found["weight"] == "bf16"


@pytest.mark.parametrize("name", ["f16", "mixed_bf16"])
def test_int8_attention_stays_f32(name):
    b = bw.Builder("attention")
    x = b.input("x", "f32[1, 2, 40, 8]")
    graph = b.build(b.attention(b.relu(x), x, x, int8=True, name="y"))
    changed = bw.apply_precision(graph, name)
    assert types(changed)["y"] == "f32"
    feeds = np.random.default_rng(0).normal(size=(1, 2, 40, 8)).astype(np.float32)
    expected, found = (reference(g, x=feeds)["y"] for g in (graph, changed))
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_integer_outputs_and_comparisons_keep_their_types():
    b = bw.Builder("integers")
    x = b.input("x", "f32[2, 8]")
    values, places = b.top_k(x, k=2)
    graph = b.build(values, places, b.gt(x, 0.5), b.argmax(x, axis=1), b.cast(x, to="i32"))
    changed = bw.apply_precision(graph, "mixed")
    assert [str(v.dtype) for _, v in changed.outputs] == [str(v.dtype) for _, v in graph.outputs]


def test_bodies_get_the_policy_and_keep_their_border():
    inner = bw.Builder("inner")
    one, two = inner.input("one", "f32[2, 2]"), inner.input("two", "f32[2, 2]")
    body = inner.build(inner.matmul(one, two, name="inside"))
    b = bw.Builder("outer")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[2, 2]")
    y = b.if_(flag, b.relu(x), x, then=body, **{"else": body})
    changed = bw.apply_precision(b.build(y=y), "mixed")
    (node,) = (n for n in changed.nodes if n.op == "if")
    for graph in node.bodies.values():
        assert types(graph)["inside"] == "f16" and str(graph.outputs[0][1].dtype) == "f32"
    assert str(bw.apply_precision(changed, "mixed")) == str(changed)


@pytest.mark.parametrize("name", ["mixed", "mixed_conservative", "mixed_bf16"])
def test_a_double_graph_gives_doubles(name):
    b = bw.Builder("double")
    x = b.input("x", "f64[3, 3]")
    y = b.softmax(b.matmul(x, x, name="product"), axis=-1, name="rows")
    changed = bw.apply_precision(b.build(y=y), name)
    assert types(changed)["product"] in ("f16", "bf16")
    full = name == "mixed_conservative"
    assert types(changed)["rows"] == ("f64" if full else types(changed)["product"])
    assert str(changed.outputs[0][1].dtype) == "f64"
    assert str(bw.apply_precision(changed, name)) == str(changed)


def test_a_graph_already_in_f16_is_left_alone_by_mixed():
    b = bw.Builder("half")
    x = b.input("x", "f16[3, 3]")
    graph = b.build(y=b.softmax(b.matmul(x, x, name="product"), axis=-1, name="rows"))
    assert str(bw.apply_precision(graph, "mixed")) == str(graph)
    found = types(bw.apply_precision(graph, "mixed_conservative"))
    assert (found["product"], found["rows"]) == ("f16", "f32")


def test_states_are_updated_in_their_own_type():
    b = bw.Builder("cache")
    state, x = b.state("kept", np.zeros((2, 2), np.float32)), b.input("x", "f32[2, 2]")
    y = b.matmul(x, state)
    b.update(state, y)
    changed = bw.apply_precision(b.build(y=y), "mixed_bf16")
    assert [str(v.dtype) for v in changed.updates[0]] == ["f32", "f32"]


def test_values_observed_too_large_or_too_small_stay_wide():
    graph = each_kind()
    _, said = reasons(graph, "f16", {"compute": Extent(1e6)})
    assert "1e+06, too large" in said["compute"] and "too large" in said["reduction"]
    assert "elementwise" not in said
    _, said = reasons(graph, "f16", {"elementwise": Extent(1e-7)})
    assert "too small" in said["elementwise"]
    assert not reasons(graph, "mixed_bf16", {"compute": Extent(1e6)})[1]


@pytest.mark.parametrize("op", ["rnn", "gru", "lstm"])
def test_recurrent_layers_keep_their_kernels(op):
    rng, gates = np.random.default_rng(0), {"rnn": 1, "gru": 3, "lstm": 4}[op]
    shapes = (5, 2, 3), (1, gates * 4, 3), (1, gates * 4, 4)
    x, w, r = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    b = bw.Builder(op)
    node = b.node(op, [b.input("x", "f32[5, 2, 3]"), b.constant(w), b.constant(r)], {}, [])
    graph = b.build(y=node.outputs[0])
    exe = bw.compile(graph, precision="mixed_bf16")
    assert not list(exe.engine.fallbacks)
    assert np.abs(exe.run({"x": x})["y"] - reference(graph, x=x)["y"]).max() < 0.03


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_largest_finite_magnitude(kind):
    assert largest_magnitude(np.array([1, -3.5, 2], kind)) == 3.5
    assert largest_magnitude(np.array([1, -3.5, np.nan, -np.inf], kind)) == 3.5
    assert largest_magnitude(np.zeros(0, kind)) == 0
    assert largest_magnitude(np.array(-2, kind)) == 2
    assert largest_magnitude(np.arange(6.0).astype(kind).reshape(2, 3).T) == 5
