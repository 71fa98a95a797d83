"""Ops that users register, host steps through onnx, and warnings given once."""

import warnings

import numpy as np
import pytest
from onnx import helper
from single_op import evaluate, infer

from bitwright import warn
from bitwright.errors import GraphError, InferenceError, RunError
from bitwright.ir import OpaqueType, parse, to_text
from bitwright.ops.control.custom import custom, find_custom, register_custom
from bitwright.ops.control.fallback import encode_node
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph

X = np.array([[1, -2, 3]], np.float32)


@pytest.fixture(autouse=True)
def fresh_warnings():
    warn.forget()


def shift(x, offset):
    return x + offset


register_custom("test.shift", infer=lambda x, offset: x, reference=shift, replace=True)


def test_a_registered_op_runs():
    b = Builder()
    y = custom(b, "test.shift", b.input("x", "f32[n, 3]"), offset=2)
    graph = verify(b.build(y=y))
    again = verify(parse(to_text(graph)))
    assert run(again, {"x": X})["y"].tolist() == (X + 2).tolist()
    assert str(y.type) == "f32[n, 3]"


WRONG = {
    "wider": (lambda x: x.astype(np.float64), r"'test.wrong' gave .* element type .*f32.*float64"),
    "whole": (lambda x: x.astype(np.int32), r"element type .*f32.*int32"),
    "more": (lambda x: (x, x), r"number of results .*expected 1, found 2"),
    "other shape": (lambda x: x[:, :2], "another shape"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_function_that_does_not_give_what_it_declared(name, target):
    function, message = WRONG[name]
    register_custom("test.wrong", infer=lambda x: x, reference=function, replace=True)
    b = Builder()
    x = b.input("x", "f32[n, 3]")
    graph = b.build(y=b.add(custom(b, "test.wrong", x), 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executable = compile_graph(graph, target=target)
    with pytest.raises(RunError, match=message):
        executable.run({"x": X})


def test_an_unknown_name_is_an_error_with_a_hint():
    b = Builder()
    with pytest.raises(InferenceError, match=r"no custom op is named 'test.shif'.*'test.shift'"):
        custom(b, "test.shif", b.input("x", "f32[3]"), offset=2)


def test_a_name_is_registered_once():
    with pytest.raises(GraphError, match=r"named 'test\.shift' already"):
        register_custom("test.shift", infer=shift, reference=shift)
    assert find_custom("test.shift").reference is shift


def test_attributes_must_be_plain():
    b = Builder()
    with pytest.raises(GraphError, match="not plain"):
        custom(b, "test.shift", b.input("x", "f32[3]"), offset=object())
    with pytest.raises(InferenceError, match="not a JSON object"):
        b.custom(b.input("y", "f32[3]"), function="test.shift", attributes="[1]")


def test_a_gradient_that_is_missing_is_an_error():
    from bitwright.ops.core.registry import get

    b = Builder()
    y = custom(b, "test.shift", b.input("x", "f32[3]"), offset=2)
    with pytest.raises(GraphError, match=r"'test\.shift' has no gradient"):
        get("custom").grad(b, y.node, [y])


def host(node, types, version=21, **attrs):
    return {
        "op_type": node.op_type,
        "domain": node.domain,
        "version": version,
        "proto": encode_node(node),
        "types": types,
        **attrs,
    }


def test_a_fallback_runs_and_warns_once():
    node = helper.make_node("Celu", ["x"], ["y"], alpha=0.5)
    with pytest.warns(warn.BitwrightWarning, match="ONNX op Celu: there is no kernel"):
        found = evaluate("host", X, **host(node, ["f32[1, 3]"]))
    expected = np.maximum(X, 0) + np.minimum(0, 0.5 * np.expm1(X / 0.5))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate("host", X, **host(node, ["f32[1, 3]"]))


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_sequences_pass_between_fallbacks():
    b = Builder()
    x = b.input("x", "f32[n, 3]")
    pair = helper.make_node("SequenceConstruct", ["a", "b"], ["s"])
    joined = helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)
    sequence = b.host(x, x, **host(pair, ["host<seq(tensor(f32))>"]))
    assert sequence.type == OpaqueType("seq(tensor(f32))")
    graph = verify(b.build(y=b.host(sequence, **host(joined, ["f32[2*n, 3]"]))))
    assert run(parse(to_text(graph)), {"x": X})["y"].tolist() == np.concatenate([X, X]).tolist()


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_bodies_of_fallbacks_read_captures():
    inner = helper.make_node("Add", ["x", "outer"], ["y"])
    info = [helper.make_tensor_value_info("y", 1, [1, 3])]
    branches = {
        f"{name}_branch": helper.make_graph([inner], name, [], info) for name in ("then", "else")
    }
    node = helper.make_node("If", ["c"], ["y"], **branches)
    attrs = host(node, ["f32[1, 3]"], captures=["x", "outer"])
    found = evaluate("host", np.array(True), X, X, **attrs)
    assert found.tolist() == (2 * X).tolist()


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_an_absent_operand_stays_absent():
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    found = evaluate("host", X, None, np.float32(2), **host(node, ["f32[1, 3]"]))
    assert found.tolist() == [[1, -2, 2]]
    node = helper.make_node("Clip", ["x", "low"], ["y"])
    found = evaluate("host", X, None, **host(node, ["f32[1, 3]"]))
    assert found.tolist() == X.tolist()


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_the_opset_version_counts():
    """Before opset 11 the limits of Clip are attributes."""
    node = helper.make_node("Clip", ["x"], ["y"], max=2.0)
    found = evaluate("host", X, **host(node, ["f32[1, 3]"], version=6))
    assert found.tolist() == [[1, -2, 2]]


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_what_onnx_cannot_run_is_an_error_of_ours():
    node = helper.make_node("Mystery", ["x"], ["y"], domain="acme")
    with pytest.raises(RunError, match=r"implementation of acme\.Mystery fails"):
        evaluate("host", X, **host(node, ["f32[1, 3]"]))
    node = helper.make_node("Add", ["x", "y"], ["z"])
    with pytest.raises(RunError, match="implementation of Add fails"):
        evaluate("host", X, np.zeros((2, 2), np.float32), **host(node, ["f32[1, 3]"]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"proto": "AAA"}, "does not hold an ONNX node"),
        ({"proto": "////"}, "does not hold an ONNX node"),
        ({"op_type": "Relu"}, "another op; expected Relu, found Celu"),
        ({"types": ["f32[3]", "f32[3]"]}, "expected 1, found 2"),
        ({"types": ["f33[3]"]}, "no element type is named 'f33'"),
    ],
)
def test_host_faults(changes, message):
    node = helper.make_node("Celu", ["x"], ["y"])
    with pytest.raises(InferenceError, match=message):
        infer("host", "f32[3]", **{**host(node, ["f32[3]"]), **changes})
