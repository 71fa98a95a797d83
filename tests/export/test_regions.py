"""Regions: standard nodes that implement one op, which bitwright imports as that op."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_runs import checked, run_ort

import bitwright as bw
from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.regions import KEY
from bitwright.ops.core.builder import Builder


def network():
    """Dynamic quantization, int8 attention, and a weight-only product."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b = Builder("net")
    x = b.input("x", "f32[2, n, 16]")
    qvalues, scale, zero = b.dynamic_quantize(x, to="u8", per_token=True)
    rows = b.dequantize(qvalues, scale, zero, axis=-1, block=16)
    w = b.dequantize(
        rng.integers(-127, 128, (16, 32)).astype(np.int8),
        np.float32(0.005) * (1 + draw(32) ** 2),
        axis=1,
    )
    heads = b.transpose(
        b.reshape(b.matmul(rows, w), shape=(2, x.shape[1], 4, 8)), perm=(0, 2, 1, 3)
    )
    y = b.attention(heads, heads, heads, int8=True, causal=True)
    y = b.reshape(b.transpose(y, perm=(0, 2, 1, 3)), shape=(2, x.shape[1], 32))
    last = b.dequantize(
        rng.integers(-7, 8, (32, 8)).astype(np.int8), np.float32(0.02) * (1 + draw(8) ** 2), axis=1
    )
    return b.build(y=b.matmul(y, last))


def feeds(count=5):
    return {"x": np.random.default_rng(1).normal(size=(2, count, 16)).astype(np.float32)}


def regions_of(model):
    return json.loads({entry.key: entry.value for entry in model.metadata_props}[KEY])


def with_regions(model, text):
    for entry in model.metadata_props:
        if entry.key == KEY:
            entry.value = text
    return model


def ops(graph):
    return [node.op for node in graph.nodes]


def test_the_metadata_names_them():
    model = checked(network())
    found = sorted(region["op"] for region in regions_of(model))
    assert found == ["attention", "dequantize", "dynamic_matmul"]
    assert not model.functions and {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("opset", [13, 17, 21, 25])
def test_they_round_trip(opset, tmp_path):
    graph, path = network(), tmp_path / "net.onnx"
    graph.save(path, opset=opset)
    again = bw.load(path)
    (attention,) = [node for node in again.nodes if node.op == "attention"]
    assert attention.attrs["int8"] and ops(again).count("dynamic_quantize") == 1
    assert "softmax" not in ops(again)
    given = feeds()
    np.testing.assert_array_equal(
        bw.compile(path).run(given)["y"], bw.compile(graph).run(given)["y"]
    )
    np.testing.assert_allclose(
        run_ort(str(path), given)["y"], bw.compile(graph).run(given)["y"], atol=0.5
    )


def test_external_data_changes_nothing(tmp_path):
    network().save(tmp_path / "net.onnx", external_data=True)
    assert "dynamic_quantize" in ops(bw.load(tmp_path / "net.onnx"))


def test_a_changed_node_is_imported_as_it_is():
    model = checked(network())
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "Sigmoid"
    del softmax.attribute[:]
    again = load(model)
    assert "attention" not in ops(again)
    assert "dynamic_quantize" in ops(again)  # another region, which is unchanged
    given = feeds()
    expected = run_ort(model, given)["y"]
    exact = bw.compile(again, target="reference").run(given)["y"]
    np.testing.assert_allclose(exact, expected, atol=0.05 * np.abs(expected).max())


def test_a_changed_constant_is_noticed():
    model = checked(network())
    region = next(r for r in regions_of(model) if r["op"] == "attention")
    scale = next(
        t
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT
        and not t.dims
        and t.name not in region["reads"]
        and 0 < abs(float(numpy_helper.to_array(t))) < 1
    )
    scale.raw_data = np.float32(0.125).tobytes()
    assert "attention" not in [n.op for n in load(model).nodes if n.attrs.get("int8")]


def test_renamed_values_are_found_where_the_metadata_follows():
    model = checked(network())
    text = json.dumps(regions_of(model))
    names = {name for node in model.graph.node for name in node.output} - {"y"}
    for node in model.graph.node:
        node.input[:] = [f"renamed/{n}" if n in names else n for n in node.input]
        node.output[:] = [f"renamed/{n}" if n in names else n for n in node.output]
    del model.graph.value_info[:]
    lost = load(model)
    assert "dynamic_quantize" not in ops(lost)
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(f'"{name}"', f'"renamed/{name}"')
    assert "dynamic_quantize" in ops(load(with_regions(model, text)))


def test_an_inner_value_with_other_readers_is_kept():
    model = checked(network())
    region = next(r for r in regions_of(model) if r["op"] == "dynamic_matmul")
    inside = next(n.input[1] for n in model.graph.node if n.output[0] == region["outputs"][0])
    model.graph.node.append(helper.make_node("Identity", [inside], ["weight"]))
    model.graph.output.append(helper.make_tensor_value_info("weight", 1, [16, 32]))
    again = load(model)
    assert "dynamic_quantize" in ops(again)
    given = feeds()
    np.testing.assert_allclose(
        bw.compile(again).run(given)["weight"], run_ort(model, given)["weight"], rtol=1e-6
    )


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[" * 100_000,
        "{}",
        '[{"op": "attention"}]',
        '[{"op": 1, "attrs": [], "operands": 3, "reads": [], "outputs": [], "digest": ""}]',
        '[{"op": "relu", "attrs": {}, "operands": ["x"], "reads": [], "outputs": ["y"],'
        ' "digest": "0"}]',
    ],
    ids=range(6),
)
def test_malformed_metadata_is_ignored(text):
    model = with_regions(checked(network()), text)
    again = load(model)
    assert "dynamic_quantize" not in ops(again)
    given = feeds()
    expected = bw.compile(network()).run(given)["y"]
    np.testing.assert_allclose(bw.compile(again).run(given)["y"], expected, atol=0.5)


def test_a_region_that_names_another_op_does_not_fit_and_is_inlined():
    model = checked(network())
    regions = regions_of(model)
    for region in regions:
        region["op"], region["attrs"] = "dequantize", {"axis": 77}
    again = load(with_regions(model, json.dumps(regions)))
    assert "dynamic_quantize" not in ops(again)
    assert bw.compile(again).run(feeds())["y"].shape == (2, 5, 8)


def test_regions_in_branches():
    rng = np.random.default_rng(3)
    branches = []
    for seed in (0, 1):
        b = Builder(f"branch{seed}")
        x = b.input("x", "f32[n, 8]")
        qvalues, scale, zero = b.dynamic_quantize(x, to="u8", per_token=True)
        rows = b.dequantize(qvalues, scale, zero, axis=-1, block=8)
        w = rng.integers(-127, 128, (8, 4)).astype(np.int8)
        branches.append(b.build(y=b.matmul(rows, b.dequantize(w, np.float32(0.01)))))
    b = Builder("choice")
    x, flag = b.input("x", "f32[n, 8]"), b.input("flag", "bool[]")
    attrs = {"then": branches[0], "else": branches[1]}
    graph = b.build(y=b.node("if", [flag, x], attrs, []).outputs[0])
    again = load(checked(graph))
    bodies = [body for node in again.nodes for body in node.bodies.values()]
    assert all("dynamic_quantize" in ops(body) for body in bodies) and len(bodies) == 2
    for flag in (True, False):
        given = {"x": rng.normal(size=(3, 8)).astype(np.float32), "flag": np.array(flag)}
        np.testing.assert_array_equal(
            bw.compile(again).run(given)["y"], bw.compile(graph).run(given)["y"]
        )
