"""Values of data-dependent rank: results as in ONNX Runtime, without fallbacks."""

from functools import partial
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, parser

import bitwright as bw
from bitwright.errors import BitwrightError, ExportError, RunError
from bitwright.ir.types import TensorType

HEADER = '<ir_version: 8, opset_import: ["": 17]>\n'


def squeeze_if(x="x", s="s"):
    """The export of `s = x.squeeze(1)` by PyTorch."""
    return f"""
      {s}_sizes = Shape({x})
      {s}_one = Constant <value_int = 1>()
      {s}_size = Gather({s}_sizes, {s}_one)
      {s}_is_one = Equal({s}_size, {s}_one)
      {s} = If({s}_is_one) <
        then_branch = then () => ({s}_then) {{
          {s}_axes = Constant <value_ints = [1]>()
          {s}_then = Squeeze({x}, {s}_axes)
        }},
        else_branch = other () => ({s}_else) {{ {s}_else = Identity({x}) }}
      >
    """


def model(text):
    return parser.parse_model(HEADER + text)


def without_types(proto):
    """The model without declared output types, since their ranks depend on the run."""
    for output in proto.graph.output:
        output.ClearField("type")
    return proto


def session(proto):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options)


def run_ort(proto, feeds):
    made = session(proto)
    return dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds), strict=True))


def check(proto, *many_feeds):
    """The graph, after its results and those of its export are compared with ONNX Runtime."""
    graph = bw.load(proto)
    assert [node.op for _, node in graph.walk() if node.op == "host"] == []
    runs = [bw.compile(graph).run]
    if all(isinstance(value.type, TensorType) for _, value in graph.outputs):
        runs.append(partial(run_ort, bw.export_onnx(graph)))
    else:
        with pytest.raises(ExportError, match="the rank of 'y' is not known"):
            bw.export_onnx(graph)
    for feeds, run in product(many_feeds, runs):
        expected, found = run_ort(proto, feeds), run(feeds)
        assert list(found) == list(expected)
        for name, want in expected.items():
            assert np.shape(found[name]) == want.shape
            np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6)
    return graph


def x(*shape):
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def test_later_nodes_are_imported_for_both_ranks():
    proto = model(
        "m (float[N, C, 3] x) => (float[K] y, float[N, C, 3] z) {"
        + squeeze_if()
        + " y = ReduceSum <keepdims = 0>(s) t = Relu(s) total = ReduceMax <keepdims = 1>(t) "
        "z = Add(x, y) }"
    )
    graph = check(proto, x(2, 1, 3), x(2, 4, 3))
    assert [node.op for node in graph.nodes].count("if") == 1


def test_rank_stays_open_in_the_result():
    proto = model("m (float[N, C, 3] x) => (float[N] y) {" + squeeze_if() + " y = Neg(s) }")
    check(without_types(proto), x(2, 1, 3), x(2, 4, 3))


def test_two_forks_make_four_cases():
    proto = model(
        "m (float[N, C, 3] x, float[N, D, 3] w) => (float[N] y) {"
        + squeeze_if("x", "s")
        + squeeze_if("w", "t")
        + " p = ReduceMax <keepdims = 0>(s) q = ReduceMax <keepdims = 0>(t) "
        "r = Mul(p, q) y = Mul(r, t) }"
    )
    feeds = [{**x(2, c, 3), "w": x(2, d, 3)["x"]} for c in (1, 4) for d in (1, 5)]
    check(without_types(proto), *feeds)


def test_case_without_valid_types_fails_at_run_time():
    tail = " w = Transpose <perm = [1, 0]>(s) y = Neg(w) }"
    proto = model("m (float[N, C, 3] x) => (float[3, N] y) {" + squeeze_if() + tail)
    graph = check(proto, x(2, 1, 3), x(5, 1, 3))
    assert {node.op for _, node in graph.walk()}.isdisjoint({"if", "require"})
    with pytest.raises(RunError):
        bw.compile(graph).run(x(2, 4, 3))
    with pytest.raises(Exception, match=r"Transpose|perm"):
        run_ort(proto, x(2, 4, 3))


def test_case_that_does_not_fail_by_itself_is_checked():
    tail = " w = Transpose <perm = [1, 0, 2]>(s) y = Neg(w) }"
    proto = model("m (float[N, C, 3] x) => (float[C, N, 3] y) {" + squeeze_if() + tail)
    graph = check(proto, x(2, 4, 3), x(5, 2, 3))
    assert [node.op for node in graph.nodes].count("require") == 1
    with pytest.raises(RunError, match="not valid for inputs of these sizes"):
        bw.compile(graph).run(x(2, 1, 3))
    with pytest.raises(Exception, match="out of data bounds"):
        run_ort(bw.export_onnx(graph), x(2, 1, 3))


def test_model_without_a_valid_case_is_refused():
    tail = " y = Transpose <perm = [0, 1, 2, 3]>(s) }"
    proto = model("m (float[N, C, 3] x) => (float[N] y) {" + squeeze_if() + tail)
    with pytest.raises(BitwrightError, match="Transpose"):
        bw.load(proto)


def test_condition_on_known_sizes_leaves_no_if():
    proto = model("m (float[N, 1, 3] x) => (float[N, 3] y) {" + squeeze_if() + " y = Neg(s) }")
    graph = check(proto, x(2, 1, 3))
    assert "if" not in {node.op for node in graph.nodes}


def test_squeeze_of_all_axes_with_unknown_sizes():
    proto = model("m (float[N, 1, C] x) => (float[N] y) { s = Squeeze(x) y = Neg(s) }")
    check(without_types(proto), x(1, 1, 1), x(1, 1, 4), x(3, 1, 1), x(3, 1, 4))


def test_size_is_compared_with_one_only_once():
    proto = model(
        "m (float[N, 1, 4] x) => (float[M] y) { r = Squeeze(x) s = Squeeze(r) t = Squeeze(s) "
        + squeeze_if("x", "u")
        + " p = ReduceSum <keepdims = 0>(t) q = ReduceSum <keepdims = 0>(u) y = Add(p, q) }"
    )
    graph = check(proto, x(1, 1, 4), x(3, 1, 4))
    assert [node.op for _, node in graph.walk()].count("if") == 1


def test_many_forks_end_in_fallbacks():
    """Each size doubles the cases, up to a limit."""
    names = [f"x{i}" for i in range(9)]
    inputs = ", ".join(f"float[N{i}, 4] {name}" for i, name in enumerate(names))
    steps = " ".join(
        f"s{i} = Squeeze({name}) m{i} = ReduceSum <keepdims = 0>(s{i})"
        for i, name in enumerate(names)
    )
    total = "y = Sum(" + ", ".join(f"m{i}" for i in range(len(names))) + ")"
    proto = without_types(model(f"m ({inputs}) => (float y) {{ {steps} {total} }}"))
    graph = bw.load(proto)
    assert "host" in {node.op for _, node in graph.walk()}
    feeds = {name: x(1 + i % 2, 4)["x"] for i, name in enumerate(names)}
    (found,) = bw.compile(graph).run(feeds).values()
    np.testing.assert_allclose(found, sum(array.sum() for array in feeds.values()), rtol=1e-5)


def test_fork_inside_a_function():
    text = """
      f (x) => (y) { s = Squeeze(x) m = ReduceMax <keepdims = 1>(s) y = Sub(s, m) }
    """
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "local": 1]>\n'
        "m (float[N, 1, 4] x) => (float[N] y) { y = local.f(x) }\n"
        '<domain: "local", opset_import: ["": 17]>' + text
    )
    check(without_types(proto), x(1, 1, 4), x(3, 1, 4))


def growing_loop(first_shape, trips):
    """A loop whose carried value changes its rank after the first iteration."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["keep"]),
            helper.make_node("Cast", ["step"], ["number"], to=T.FLOAT),
            helper.make_node("ReduceSum", ["value"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["moved"]),
            helper.make_node("Add", ["moved", "number"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", T.INT64, []),
            helper.make_tensor_value_info("going", T.BOOL, []),
            helper.make_tensor_value_info("value", T.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("keep", T.BOOL, []),
            helper.make_tensor_value_info("next", T.FLOAT, None),
            helper.make_tensor_value_info("number", T.FLOAT, []),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["trips", "", "first"], ["y", "numbers"], body=body)],
        "m",
        [helper.make_tensor_value_info("x", T.FLOAT, ["N", 2])],
        [
            helper.make_tensor_value_info("y", T.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("numbers", T.FLOAT, ["K"]),
        ],
        [
            onnx.numpy_helper.from_array(np.ones(first_shape, np.float32), "first"),
            onnx.numpy_helper.from_array(np.array(trips), "trips"),
        ],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("trips", [1, 2, 5])
def test_loop_carries_another_rank_after_its_first_iteration(trips):
    check(growing_loop((), trips), x(3, 2), x(1, 2))


def test_output_named_twice_is_one_output():
    proto = model("m (float[N] x) => (float[N] y) { y = Neg(x) }")
    proto.graph.output.append(proto.graph.output[0])
    graph = bw.load(proto)
    assert [name for name, _ in graph.outputs] == ["y"]
