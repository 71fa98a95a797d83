"""Bodies, interpreter fallbacks, functions and custom ops."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_runs import assert_same, checked, run_ort, run_reference

from bitwright.errors import ExportError
from bitwright.export.onnx import export_onnx
from bitwright.ops.control.custom import custom, register_custom
from bitwright.ops.control.fallback import encode_node
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def compare(graph, *feeds):
    model = checked(graph)
    for feed in feeds:
        assert_same(run_ort(model, feed), run(graph, feed))
    return model


def branch(op, name):
    b = Builder(name)
    x, y = b.input("x", "f32[rows, 3]"), b.input("y", "f32[3]")
    return b.build(result=b.op(op, x, y))


def test_captures_of_an_if_are_outer_values():
    b = Builder("choice")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[n, 3]")
    y = b.parameter("y", np.array([1, 2, 3], np.float32))
    graph = b.build(z=b.if_(flag, x, y, **{"then": branch("add", "t"), "else": branch("mul", "e")}))
    model = compare(graph, *({"flag": np.array(f), "x": X} for f in (True, False)))
    then = model.graph.node[0].attribute[0].g
    assert not then.input and list(then.node[0].input) == ["x", "y"]


def test_a_branch_may_return_a_capture():
    b = Builder("choice")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[3]")
    through, negated = Builder("then"), Builder("else")
    then = through.build(through.input("x", "f32[3]"))
    other = negated.build(negated.neg(negated.input("x", "f32[3]")))
    graph = b.build(z=b.if_(flag, x, **{"then": then, "else": other}))
    compare(graph, *({"flag": np.array(f), "x": X[0]} for f in (True, False)))


def counting_body(keep_going):
    b = Builder("body")
    step, going = b.input("step", "i64[]"), b.input("going", "bool[]")
    total, x = b.input("total", "f32[3]"), b.input("x", "f32[rows, 3]")
    row = b.reshape(b.slice(x, starts=[0], stops=[1], steps=[1], axes=[0]), shape=(3,))
    added = b.add(total, row)
    keep = b.lt(step, keep_going) if keep_going is not None else going
    return b.build(keep=keep, total=added, row=added, step=step)


@pytest.mark.parametrize(
    "count, condition", [(5, True), (5, None), (None, True), (0, True), (2, None)]
)
def test_loops_end_after_the_same_iterations(count, condition):
    """Without a condition that of the body is ignored, unless there is no count either."""
    b = Builder("loop")
    x, start = b.input("x", "f32[rows, 3]"), b.input("start", "f32[3]")
    trips = None if count is None else b.constant(np.int64(count))
    flag = None if condition is None else b.constant(condition)
    total, rows, steps = b.loop(trips, flag, start, x, body=counting_body(2), carried=1)
    graph = b.build(total=total, rows=rows, steps=steps)
    compare(graph, {"x": X, "start": X[1]})


def test_nested_bodies_reach_values_two_levels_out():
    inner = Builder("inner")
    _, going = inner.input("step", "i64[]"), inner.input("going", "bool[]")
    total, x = inner.input("total", "f32[n]"), inner.input("x", "f32[n]")
    body = inner.build(going=going, total=inner.add(total, x))
    outer = Builder("outer")
    _, going = outer.input("step", "i64[]"), outer.input("going", "bool[]")
    total, x = outer.input("total", "f32[n]"), outer.input("x", "f32[n]")
    run_twice = outer.loop(outer.constant(np.int64(2)), None, total, x, body=body, carried=1)
    outer_body = outer.build(going=going, total=outer.neg(run_twice))
    b = Builder("nested")
    x = b.input("x", "f32[n]")
    start = b.expand(b.constant(0.0, "f32"), shape=x.shape)
    graph = b.build(y=b.loop(b.constant(np.int64(3)), None, start, x, body=outer_body, carried=1))
    compare(graph, *({"x": np.arange(n, dtype=np.float32)} for n in (1, 4)))


def test_sizes_inside_bodies_come_from_outside_or_inside():
    body = Builder("body")
    _, going = body.input("step", "i64[]"), body.input("going", "bool[]")
    rows, x = body.input("rows", "f32[count, 2]"), body.input("x", "f32[n, 2]")
    grown = body.concat(rows, x, axis=0)
    flat = body.reshape(x, shape=(x.shape[0] * 2,))
    size = body.sizes(values=(rows.shape[0] + x.shape[0],), shape=(1,))
    made = body.build(going=going, rows=grown, flat=flat, size=size)
    b = Builder("grow")
    x = b.input("x", "f32[n, 2]")
    results = b.loop(b.constant(np.int64(3)), None, x, x, body=made, carried=1)
    graph = b.build(*results)
    compare(graph, *({"x": np.ones((n, 2), np.float32)} for n in (1, 3)))


def test_large_constants_of_bodies_are_initializers_of_the_model(tmp_path):
    table = np.arange(4096, dtype=np.float32).reshape(2, 2048)
    branches = {}
    for name, sign in (("then", 1), ("else", -1)):
        b = Builder(name)
        b.input("x", "f32[3]")
        branches[name] = b.build(b.mul(b.parameter("table", table), float(sign)))
    b = Builder("choice")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[3]")
    graph = b.build(y=b.if_(flag, x, **branches))
    model = compare(graph, {"flag": np.array(True), "x": X[0]})
    assert [t.name for t in model.graph.initializer] == ["table", "table_1"]
    export_onnx(graph, tmp_path / "m.onnx", external_data=True)
    found = run_ort(str(tmp_path / "m.onnx"), {"flag": np.array(False), "x": X[0]})
    np.testing.assert_array_equal(found["y"], -table)


def test_scans_keep_axes_and_directions():
    body = Builder("body")
    total, x = body.input("total", "f32[2]"), body.input("x", "f32[2]")
    factor = body.input("factor", "f32[]")
    added = body.add(total, body.mul(x, factor))
    made = body.build(total=added, row=added)
    b = Builder("scan")
    x, factor = b.input("x", "f32[2, steps]"), b.input("factor", "f32[]")
    start = b.constant(np.zeros(2, np.float32))
    axes = {"input_axes": [1], "output_axes": [1]}
    transposed = {"input_directions": [1], "output_directions": [1]}
    options = {"body": made, "carried": 1, "scanned": 1, **axes, **transposed}
    graph = b.build(*b.scan(start, x, factor, **options))
    feeds = {"x": np.arange(10, dtype=np.float32).reshape(2, 5), "factor": np.float32(2)}
    compare(graph, {**feeds, "factor": np.asarray(feeds["factor"])})


# interpreter fallbacks


def host(b, node, *operands, types, version=21, **attrs):
    where = {"op_type": node.op_type, "domain": node.domain, "version": version}
    return b.op("host", *operands, proto=encode_node(node), types=types, **where, **attrs)


def test_a_fallback_is_written_back_as_its_node():
    b = Builder("host")
    x = b.input("x", "f32[4]")
    node = helper.make_node("Unique", ["x"], ["a", "", "c"], sorted=0)
    values, places = host(b, node, x, types=["f32[found]", "i64[4]"], outputs=["values", "places"])
    graph = b.build(values, places)
    model = checked(graph)
    (written,) = model.graph.node
    assert list(written.input) == ["x"] and list(written.output) == ["values", "", "places"]
    feeds = {"x": np.array([2, 1, 2, 3], np.float32)}
    assert_same(run_ort(model, feeds), run(graph, feeds))


def test_names_inside_a_fallbacks_bodies_are_made_unique():
    inside = helper.make_graph(
        [helper.make_node("Add", ["x", "outer"], ["y"], name="n")],
        "body",
        [],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3])],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=inside, else_branch=inside)
    b = Builder("host")
    x, flag = b.input("x", "f32[3]"), b.input("flag", "bool[]")
    y = b.neg(x, name="y")
    graph = b.build(z=host(b, node, flag, x, y, types=["f32[3]"], captures=["x", "outer"]))
    model = checked(graph)
    feeds = {"x": X[0], "flag": np.array(True)}
    assert_same(run_ort(model, feeds), run(graph, feeds))
    bodies = [attribute.g for attribute in model.graph.node[-1].attribute]
    names = [n.output[0] for body in bodies for n in body.node] + ["y"]
    assert len(set(names)) == len(names)


def test_a_fallback_needs_its_own_version_of_the_op():
    b = Builder("host")
    node = helper.make_node("StringConcat", ["x", "y"], ["z"])
    x, y = b.input("x", "string[2]"), b.input("y", "string[2]")
    graph = b.build(host(b, node, x, y, types=["string[2]"]))
    assert checked(graph).opset_import[0].version == 20
    b = Builder("host")
    node = helper.make_node("Mod", ["x", "y"], ["z"])
    x, y = b.input("x", "i64[2]"), b.input("y", "i64[2]")
    graph = b.build(host(b, node, x, y, types=["i64[2]"]))
    with pytest.raises(ExportError, match=r"Mod of opset 21, which opset 28 changed"):
        export_onnx(graph, opset=28)


def test_sequences_pass_through_fallbacks():
    b = Builder("sequence")
    x = b.input("x", "f32[2, 3]")
    made = helper.make_node("SequenceConstruct", ["x", "x"], ["s"])
    seq = host(b, made, x, x, types=["host<seq(f32[2,3])>"])
    length = helper.make_node("SequenceLength", ["s"], ["n"])
    graph = b.build(n=host(b, length, seq, types=["i64[]"]), s=b.identity(seq))
    model = checked(graph)
    assert model.opset_import[0].version == 14  # Identity of sequences
    assert run_ort(model, {"x": X})["n"] == 2


# functions and custom ops


@pytest.mark.parametrize("options", [{"to": "i8", "per_token": True}, {"to": "i8"}, {"to": "u4"}])
def test_dynamic_quantization_is_a_function_of_the_model(options):
    b = Builder("dynamic")
    x, y = b.input("x", "f32[batch, 6]"), b.input("y", "f32[batch, 6]")
    results = {}
    for name, value in (("x", x), ("y", y)):
        qvalues, scale, zero = b.dynamic_quantize(value, **options)
        results[f"{name}_q"] = b.cast(qvalues, to="i32")
        results[f"{name}_scale"], results[f"{name}_zero"] = scale, b.cast(zero, to="i32")
    graph = b.build(**results)
    model = checked(graph, functions="local")
    assert [f.name for f in model.functions] == ["dynamic_quantize"]
    calls = [node for node in model.graph.node if node.domain == "bitwright"]
    assert [call.op_type for call in calls] == ["dynamic_quantize"] * 2
    assert model.ir_version >= 8
    assert {(o.domain, o.version) for o in model.opset_import} >= {("bitwright", 1)}
    rng = np.random.default_rng(0)
    feeds = {n: rng.normal(size=(3, 6)).astype(np.float32) for n in ("x", "y")}
    assert_same(run_ort(model, feeds), run(graph, feeds))
    assert_same(run_reference(model, feeds), run(graph, feeds))


def test_other_types_are_other_functions():
    b = Builder("dynamic")
    x = b.input("x", "f32[batch, 6]")
    for to in ("i8", "i16"):
        b.output(to, b.dynamic_quantize(x, to=to, per_token=True)[0])
    model = checked(b.build(), functions="local")
    assert [f.name for f in model.functions] == ["dynamic_quantize", "dynamic_quantize_1"]


def test_custom_ops_keep_domain_name_and_attributes():
    for name in ("acme.fast.scale", "plain"):
        register_custom(name, lambda x, **_: x, lambda x, **_: x, replace=True)
    b = Builder("custom")
    x = b.input("x", "f32[3]")
    y = custom(b, "acme.fast.scale", x, factor=2.5, mode="up", steps=[1, 2], count=3)
    model = checked(b.build(y=custom(b, "plain", y)))
    first, second = model.graph.node
    assert (first.domain, first.op_type) == ("acme.fast", "scale")
    attrs = {a.name: helper.get_attribute_value(a) for a in first.attribute}
    assert attrs == {"factor": 2.5, "mode": b"up", "steps": [1, 2], "count": 3}
    assert (second.domain, second.op_type) == ("bitwright.custom", "plain")
    domains = {o.domain: o.version for o in model.opset_import}
    assert domains["acme.fast"] == domains["bitwright.custom"] == 1


def test_custom_attributes_without_an_onnx_type_are_refused():
    register_custom("acme.odd", lambda x, **_: x, lambda x, **_: x, replace=True)
    b = Builder("custom")
    y = custom(b, "acme.odd", b.input("x", "f32[3]"), table={"a": 1})
    with pytest.raises(ExportError, match=r"attribute 'table' is .* which no ONNX attribute holds"):
        export_onnx(b.build(y))
