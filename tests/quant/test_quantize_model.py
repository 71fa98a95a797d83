"""bw.quantize on small models: results, execution in other runtimes, and errors."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.ops.core.interpret import run
from bitwright.quant.model import stages
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.recipe import RECIPES, matches, recipe
from bitwright.quant.model.weights.nearest import Range, rows_round_trip
from bitwright.warn import DataWarning


def network(seed=0, outliers=False):
    """A convolution, a depthwise one, a 1x1 one, a mean and two products with an outlier."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 3, 12, 12]")
    y = b.relu(b.conv(x, draw(16, 3, 3, 3), draw(16), pads=(1, 1, 1, 1), name="first"))
    y = b.relu(b.conv(y, draw(16, 1, 3, 3), draw(16), pads=(1, 1, 1, 1), groups=16, name="deep"))
    wide = draw(24, 16, 1, 1)
    if outliers:
        wide[3] *= 200
    y = b.conv(y, wide, draw(24), name="point")
    y = b.conv(y, draw(8, 24, 1, 1), draw(8), name="narrow")
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    y = b.gelu(b.add(b.matmul(y, draw(8, 32), name="up"), draw(32)))
    return b.build(logits=b.matmul(y, draw(32, 10), name="down"))


def batches(count=12, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(2, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())


@pytest.fixture(scope="module")
def quantized():
    return bw.quantize(network(), batches())


def outputs(model, data):
    exe = bw.compile(model)
    return np.concatenate([exe.run(batch)["logits"] for batch in data])


def test_keeps_the_outputs_on_data_it_has_not_seen(quantized):
    data = batches(seed=2)
    assert sqnr(outputs(network(), data), outputs(quantized, data)) > 25


def test_all_products_are_in_8_bits_and_listed(quantized):
    report = quantized.report
    assert report.int8_mac_fraction == 1
    assert {layer.name for layer in report.layers} == {
        "first", "deep", "point", "narrow", "up", "down",
    }  # fmt: skip
    assert all(layer.reason and layer.sqnr_db > 25 for layer in report.layers)
    assert "100.0%" in str(report)
    assert report.to_json()["layers"][0]["name"] == "first"
    assert report.quantized_bytes < 0.45 * report.float_bytes


def test_a_quantized_model_stays_unchanged_and_the_report_says_so(quantized):
    with pytest.warns(DataWarning, match="6 of 6 layers are already quantized"):
        again = bw.quantize(quantized.graph, batches(4))
    assert {layer.scheme for layer in again.report.layers} == {"already_quantized"}
    assert again.report.int8_mac_fraction == 1 and "already quantized" in str(again.report)
    data = batches(2, seed=3)
    np.testing.assert_array_equal(outputs(again, data), outputs(quantized, data))
    weights = bw.quantize(network(), batches(4), "w8")
    again = bw.quantize(weights.graph, batches(4))
    assert again.report.notes == [] and again.report.int8_mac_fraction == 0
    assert {layer.reason for layer in again.report.layers} == {"its weight is already quantized"}


def test_products_have_quantized_weights_and_activations(quantized):
    for node in quantized.graph.nodes:
        if node.op in ("matmul", "conv"):
            x, w = node.inputs[:2]
            assert x.node.op == w.node.op == "dequantize"
            assert w.node.inputs[0].dtype == bw.dtype("i8")
            assert x.node.inputs[0].dtype == bw.dtype("u8")


def test_the_compiled_model_agrees_with_the_interpreter(quantized):
    data = batches(2)
    reference = bw.compile(quantized, target="reference")
    exact = np.concatenate([reference.run(batch)["logits"] for batch in data])
    assert sqnr(exact, outputs(quantized, data)) > 35


TENSORS = {"schemes": {"*": "dynamic_per_tensor"}}


@pytest.mark.parametrize("name", ["int8", "int8-static", "int8-dynamic", "w8", "w4", TENSORS])
def test_the_exported_model_runs_in_onnx_runtime_and_loads_again(name, tmp_path):
    import onnxruntime

    quantized = bw.quantize(network(), batches(), recipe=name)
    path = tmp_path / "q.onnx"
    quantized.save(path)
    session = onnxruntime.InferenceSession(str(path))
    data = batches(4, seed=3)
    theirs = np.concatenate([session.run(None, batch)[0] for batch in data])
    ours = outputs(quantized, data)
    assert sqnr(ours, theirs) > 30
    again = bw.load(path)
    count = lambda graph, op: sum(node.op == op for node in graph.nodes)
    for op in ("dynamic_quantize", "quantize", "dequantize"):
        assert count(again, op) == count(quantized.graph, op)
    np.testing.assert_allclose(outputs(again, data), ours, rtol=1e-4, atol=1e-4)


def test_an_outlier_channel_is_smoothed_or_quantized_row_by_row():
    graph = network(outliers=True)
    quantized = bw.quantize(graph, batches())
    data = batches(seed=2)
    assert sqnr(outputs(graph, data), outputs(quantized, data)) > 22
    layer = next(x for x in quantized.report.layers if x.name == "narrow")
    assert layer.scheme == "dynamic_per_token" or layer.smoothing > 0


def test_bias_correction_folds_into_an_added_constant():
    """A second addition could be merged by a compiler and round differently."""
    rng, b = np.random.default_rng(0), bw.Builder("positions")
    w, positions = (rng.normal(size=size).astype(np.float32) for size in ((16, 24), (5, 24)))
    graph = b.build(y=b.add(b.matmul(b.input("x", "f32[n, 5, 16]"), w, name="m"), positions))
    data = [{"x": rng.normal(size=(4, 5, 16)).astype(np.float32)} for _ in range(4)]
    made = bw.quantize(graph, data, "int8-dynamic").graph
    (total,) = (node for node in made.nodes if node.op == "add")
    moved = total.inputs[1].node.attrs["value"] - positions
    assert moved.any() and np.abs(moved - moved[0]).max() < 1e-6  # a vector, the same everywhere
    assert "m" in {node.name for node in made.nodes if node.op == "matmul"}


def test_rope_tables_are_upcast_to_f64_and_sines_of_data_are_not():
    rng, b = np.random.default_rng(0), bw.Builder("turned")
    places = b.cast(b.input("places", "i64[n, 1]"), to="f32")
    table = b.cos(b.mul(places, np.float32([1, 0.1, 0.01])), name="table")
    wave = b.sin(b.input("x", "f32[n, 3]"), name="wave")
    w = rng.normal(size=(3, 5)).astype(np.float32)
    graph = b.build(y=b.matmul(b.mul(table, wave), w), table=table)
    data = [
        {"x": rng.normal(size=(9, 3)).astype(np.float32), "places": np.arange(9)[:, None] + 50 * i}
        for i in range(4)
    ]
    asked = {"base": "int8-dynamic", "consumer": "onnxruntime"}
    made = bw.quantize(graph, data, asked).graph
    kinds = {node.op: str(node.outputs[0].dtype) for node in made.nodes}
    assert kinds["cos"] == "f64" and kinds["sin"] == "f32"
    angles = (data[3]["places"].astype(np.float32) * np.float32([1, 0.1, 0.01])).astype(np.float64)
    found = bw.compile(made).run(data[3])["table"]
    np.testing.assert_array_equal(found, np.cos(angles).astype(np.float32))
    for chosen in ({"base": "w8", "consumer": "onnxruntime"}, "int8-dynamic"):
        kept = bw.quantize(graph, data, chosen).graph
        assert {str(n.outputs[0].dtype) for n in kept.nodes if n.op == "cos"} == {"f32"}


def test_smoothing_divides_before_a_relu_without_other_readers():
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(16, 3, 1, 1)).astype(np.float32)
    wide[3] *= 50
    last = rng.normal(size=(8, 16, 3, 3)).astype(np.float32)
    for kept in (False, True):
        b = bw.Builder("net")
        held = b.relu(b.conv(b.input("x", "f32[n, 3, 12, 12]"), wide, name="wide"), name="held")
        y = b.conv(held, last, name="last")
        graph = b.build(y=y, held=held) if kept else b.build(y=y)
        quantized = bw.quantize(graph, batches(), recipe="int8-static")
        qvalues = next(
            n for n in quantized.graph.nodes if n.op == "quantize" and n.name != "x.quantized"
        )
        assert qvalues.inputs[0].node.op == ("mul" if kept else "relu")
        data = batches(2, seed=3)
        exact, found = bw.compile(graph), bw.compile(quantized)
        assert all(sqnr(exact.run(d)["y"], found.run(d)["y"]) > 30 for d in data)


def test_a_recipe_names_what_stays_in_float_and_what_is_dynamic():
    chosen = {
        "ignore": ["re:fir", "down"],
        "schemes": {"na*": "dynamic_per_token", "point": "static"},
    }
    report = bw.quantize(network(), batches(), recipe=chosen).report
    schemes = {layer.name: layer.scheme for layer in report.layers}
    assert schemes["first"] == schemes["down"] == "float"
    assert schemes["narrow"] == "dynamic_per_token" and schemes["point"] == "static"


def test_dynamic_per_tensor_ranges():
    quantized = bw.quantize(network(), batches(), recipe=TENSORS)
    assert {layer.scheme for layer in quantized.report.layers} == {"dynamic_per_tensor"}
    assert quantized.report.int8_mac_fraction == 1
    loud = [{"x": 100 * batch["x"]} for batch in batches(4, seed=2)]  # no range foresaw these
    assert sqnr(outputs(network(), loud), outputs(quantized, loud)) > 28
    lowered = bw.compile(quantized).history.stages[-1].graph
    made = [node.op for _, node in lowered.walk()]
    assert made.count("integer_conv") == 4 and made.count("integer_matmul") == 2
    asked = bw.quantize(network(), batches(), recipe={"schemes": {"*": "dynamic_per_token"}}).report
    schemes = {layer.name: layer.scheme for layer in asked.layers}
    assert schemes["first"] == schemes["deep"] == "dynamic_per_tensor"
    assert schemes["point"] == schemes["up"] == "dynamic_per_token"


def test_lookups_have_quantized_tables():
    rng = np.random.default_rng(0)
    b = bw.Builder("words")
    ids = b.input("ids", "i64[n]")
    table = rng.normal(size=(200, 32)).astype(np.float32)
    y = b.matmul(b.gather(table, ids, axis=0, name="words"), np.eye(32, dtype=np.float32))
    graph = b.build(logits=y)
    data = [{"ids": rng.integers(0, 200, 16)} for _ in range(4)]
    quantized = bw.quantize(graph, data)
    assert sqnr(outputs(graph, data), outputs(quantized, data)) > 35
    assert any(layer.op == "embedding" for layer in quantized.report.layers)


def test_one_batch_constant_input_and_dead_channels_work():
    graph = network()
    flat = [{"x": np.zeros((1, 3, 12, 12), np.float32)}]
    found = outputs(bw.quantize(graph, flat), flat)
    np.testing.assert_allclose(found, outputs(graph, flat), atol=0.05)


def test_a_value_that_was_always_zero_or_empty_stays_float():
    rng = np.random.default_rng(0)
    b = bw.Builder()
    parts = [
        b.conv(b.input(name, f"f32[{size}, 2, 5, 5]"), rng.normal(size=(2, 2, 3, 3)).astype("f4"))
        for name, size in (("x", "n"), ("silent", "n"), ("past", "m"))
    ]
    graph = b.build(y=b.add(parts[0], parts[1]), z=parts[2])
    shape = (4, 2, 5, 5)
    empty, zero = np.zeros((0, *shape[1:]), np.float32), np.zeros(shape, np.float32)
    data = [
        {"x": rng.normal(size=shape).astype("f4"), "silent": zero, "past": empty} for _ in range(40)
    ]
    quantized = bw.quantize(graph, data)
    rows = [layer for layer in quantized.report.layers if layer.op == "conv"]
    assert [layer.scheme for layer in rows] == ["static", "float", "float"]
    assert "zero on all data" in rows[1].reason and "no calibration batch" in rows[2].reason
    later = {"x": data[0]["x"], "silent": 9 * data[1]["x"], "past": 9 * data[2]["x"]}
    exact, found = (bw.compile(model).run(later) for model in (graph, quantized))
    for name, value in exact.items():
        np.testing.assert_allclose(found[name], value, atol=0.02 * np.abs(value).max())


def test_masked_or_zero_outputs_cause_no_fallback():
    rng = np.random.default_rng(0)
    b = bw.Builder()
    y = b.matmul(b.input("x", "f32[n, 32]"), rng.normal(size=(32, 8)).astype(np.float32))
    mask = np.where(np.arange(8) < 5, 0, -np.inf).astype(np.float32)
    graph = b.build(masked=b.add(y, mask), silent=b.mul(y, np.float32(0)))
    data = [{"x": rng.normal(size=(8, 32)).astype(np.float32)} for _ in range(4)]
    report = bw.quantize(graph, data).report
    assert report.int8_mac_fraction == 1
    assert list(report.output_sqnr_db) == ["masked"] and report.output_sqnr_db["masked"] > 30


def test_the_quantizers_scored_are_the_ops_that_run():
    x = (np.random.default_rng(0).normal(size=(6, 17)) * [[1], [9], [0], [3], [1e-3], [50]]).astype(
        np.float32
    )
    b = bw.Builder("rows")
    qvalues, scale, zero = b.dynamic_quantize(b.input("x", "f32[6, 17]"), to="u8", per_token=True)
    rows = b.build(y=b.dequantize(qvalues, scale, zero, axis=-1, block=17))
    np.testing.assert_array_equal(rows_round_trip(x), run(rows, {"x": x})["y"])
    chosen = Range.over(-3.0, 11.0)
    b = bw.Builder("tensor")
    zero_point = np.uint8(chosen.zero_point)
    qvalues = b.quantize(b.input("x", "f32[6, 17]"), chosen.scale, zero_point, to="u8")
    tensor = b.build(y=b.dequantize(qvalues, chosen.scale, zero_point))
    np.testing.assert_array_equal(chosen.round_trip(x), run(tensor, {"x": x})["y"])


def test_two_bit_weights_are_stored_packed():
    made = bw.quantize(network(), batches(4), recipe={"base": "w4", "weight_bits": 2, "block": 8})
    stored = {v.dtype.name for v in made.graph.constants}
    assert "i2" in stored and "i4" not in stored
    outputs(made, batches(1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty"),
        ([{"y": np.zeros((1, 3, 12, 12), np.float32)}], "x"),
        ([{"x": np.full((1, 3, 12, 12), np.nan, np.float32)}], "NaN"),
        ([{"x": np.zeros((1, 4, 12, 12), np.float32)}], "x"),
    ],
)
def test_bad_data_is_an_error_that_says_what(data, message):
    with pytest.raises(BitwrightError, match=message):
        bw.quantize(network(), data)


@pytest.mark.parametrize(
    "wrong",
    ["int3", {"base": "int8", "bits": 3}, {"ignore": ["re:("]}, {"schemes": {"a": "magic"}},
     {"weight_bits": 5}, "missing.yaml", {"schemes": ["static"]}, {"schemes": {"a": 1}},
     {"min_int8_fraction": 2}, {"min_int8_fraction": -0.1},
     {"ignore": 5}, {"targets": [None]}, {"min_output_sqnr_db": "high"},
     {"min_output_sqnr_db": float("nan")}, {"static_sqnr_db": None}, {"block": "32"},
     {"weight_bits": True}, {"smooth": "no"}, {"rounding": 1},
     {1: 2, "bits": 3}, {"ignore": {"a": 1}}, 5, ["int8"], None],
)  # fmt: skip
def test_bad_recipes_are_errors(wrong):
    with pytest.raises(BitwrightError):
        recipe(wrong)


def test_options_take_numbers_and_lists_of_any_kind():
    given = {"min_output_sqnr_db": 3, "static_sqnr_db": np.float32(4), "block": np.int64(32)}
    made = recipe({**given, "equalize": np.False_, "targets": {"matmul"}, "ignore": "head"})
    assert (made.min_output_sqnr_db, made.static_sqnr_db, made.block, made.equalize) == (
        3,
        4,
        32,
        False,
    )
    assert (made.targets, made.ignore) == (("matmul",), ("head",))


def test_weights_are_rounded_again_only_for_a_changed_input(monkeypatch):
    """A fallback of one point leaves the weights of the others unchanged."""
    seen = []
    make = lambda stats, activation, form, tables: seen.append(activation) or {stats: len(seen)}
    monkeypatch.setattr(stages, "quantize_weights", make)
    activations = [object() for _ in range(3)]
    first, second = (
        Choice(SimpleNamespace(name=name), "static", "", activation)
        for name, activation in (("a", activations[0]), ("b", activations[1]))
    )
    state = stages.QuantizationState(None, None, None, RECIPES["int8"], None)
    state.stats = {"a": "a", "b": "b"}

    def rounded(*choices):
        state.choices = list(choices)
        stages.round_weights(state)
        return state.weights

    assert rounded(first, second) == {"a": 1, "b": 2}
    other = replace(second, activation=activations[2])
    assert rounded(first, other) == {"a": 1, "b": 3}
    assert rounded(replace(first, scheme="float", activation=None), other) == {"b": 3}
    assert len(seen) == 3


def test_patterns():
    assert matches("a.b", "a.b") and matches("a.*", "a.b") and matches("re:a.*", "a.b")
    assert not matches("re:b", "a.b") and not matches("b", "a.b")


def recurrent(op, gates, directions=2):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    b = bw.Builder(op)
    x = b.input("x", "f32[s, n, 16]")
    units = gates * 24
    operands = [
        draw(directions, units, 16),
        draw(directions, units, 24),
        draw(directions, 2 * units),
    ]
    direction = "bidirectional" if directions == 2 else "forward"
    node = b.node(op, [x, *map(b.constant, operands)], {"direction": direction}, ["y", "last"])
    y = b.transpose(node.outputs[0], perm=(0, 2, 1, 3))
    y = b.reshape(y, shape=(*x.shape[:2], 24 * directions))
    return b.build(logits=b.matmul(y, draw(24 * directions, 5), name="head"))


@pytest.mark.parametrize("op, gates", [("rnn", 1), ("gru", 3), ("lstm", 4)])
def test_recurrent_layers_are_in_8_bits(op, gates, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(1)
    data = [{"x": rng.normal(size=(9, 2, 16)).astype(np.float32)} for _ in range(12)]
    model = recurrent(op, gates)
    q = bw.quantize(model, data[:8])
    assert q.report.int8_mac_fraction == 1
    assert q.report.quantized_bytes < 0.4 * q.report.float_bytes
    exe, want = bw.compile(q), bw.compile(model)
    ops = {node.op for node in exe.history.stages[-1].graph.nodes}
    assert f"integer_{op}" in ops
    q.save(tmp_path / "q.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx")
    for batch in data[8:]:
        exact, found = want.run(batch)["logits"], exe.run(batch)["logits"]
        assert sqnr(exact, found) > 28
        assert sqnr(exact, session.run(None, batch)[0]) > 28


def test_recurrent_layers_may_stay_float_or_keep_their_states(tmp_path):
    rng = np.random.default_rng(1)
    data = [{"x": rng.normal(size=(9, 2, 16)).astype(np.float32)} for _ in range(4)]
    model = recurrent("lstm", 4, directions=1)
    left = bw.quantize(model, data, {"targets": ["matmul"]})
    assert {layer.op: layer.scheme for layer in left.report.layers}["lstm"] == "float"
    exact = bw.compile(model).run(data[0])["logits"]
    for name in ("w8", "w4"):
        q = bw.quantize(model, data, name)
        assert "integer_lstm" not in {
            node.op for node in bw.compile(q).history.stages[-1].graph.nodes
        }
        assert sqnr(exact, bw.compile(q).run(data[0])["logits"]) > (35 if name == "w8" else 15)


def test_branches_are_quantized_where_data_reaches_them(tmp_path):
    """Both branches use the same names; every batch takes one of them."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    bodies = {}
    for name in ("then", "else"):
        inner = bw.Builder(name)
        x = inner.input("x", "f32[n, 16, 9]")
        w = [rng.normal(size=(8, 16, 3)) / 7, rng.normal(size=(8, 5)) / 3]
        y = inner.relu(inner.conv(x, w[0].astype(np.float32), name="windows"))
        y = inner.transpose(y, perm=(0, 2, 1))
        bodies[name] = inner.build(inner.matmul(y, w[1].astype(np.float32), name="rows"))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[n, 16, 9]")
    model = b.build(logits=b.if_(flag, x, name="choice", **bodies))
    data = [
        {"flag": np.array(True), "x": rng.normal(size=(2, 16, 9)).astype(np.float32)}
        for _ in range(40)
    ]
    q = bw.quantize(model, data[:36])
    layers = {layer.name: layer for layer in q.report.layers}
    assert layers["choice/then/windows"].scheme == "static"
    assert layers["choice/then/rows"].scheme == "dynamic_per_token"
    assert layers["choice/else/rows"].scheme == "float"
    assert layers["choice/else/rows"].reason == "no calibration batch reached it"
    assert q.report.int8_mac_fraction == 1
    exe, want = bw.compile(q), bw.compile(model)
    q.save(tmp_path / "q.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx")
    for batch in data[36:]:
        exact, found = want.run(batch)["logits"], exe.run(batch)["logits"]
        assert 30 < sqnr(exact, found) < 80
        assert sqnr(exact, session.run(None, batch)[0]) > 30
        other = {**batch, "flag": np.array(False)}
        np.testing.assert_array_equal(want.run(other)["logits"], exe.run(other)["logits"])


def test_models_in_half_precision_are_quantized(tmp_path):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float16)
    b = bw.Builder("half")
    x = b.input("x", "f16[n, 3, 8, 8]")
    y = b.relu(b.conv(x, draw(16, 3, 3, 3), draw(16), name="first"))
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    model = b.build(logits=b.add(b.matmul(y, draw(16, 5), name="last"), draw(5)))
    data = [{"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float16)} for _ in range(12)]
    q = bw.quantize(model, data[:8])
    assert q.report.int8_mac_fraction == 1
    assert q.report.quantized_bytes < 0.8 * q.report.float_bytes  # few weights, many scales
    q.save(tmp_path / "q.onnx")
    found = bw.compile(tmp_path / "q.onnx").run(data[9])["logits"]
    exact = bw.compile(model).run(data[9])["logits"]
    assert found.dtype == exact.dtype == np.float16
    assert sqnr(exact.astype(np.float64), found.astype(np.float64)) > 25
