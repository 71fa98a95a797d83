"""Names, states and metadata of exported models."""

import json

import numpy as np
import pytest
from onnx_runs import assert_same, checked, run_ort

import bitwright
from bitwright.errors import ExportError
from bitwright.export.onnx import export_onnx
from bitwright.ir import symbol
from bitwright.ir.dtype import f32
from bitwright.ir.types import OpaqueType, TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def names(values):
    return [value.name for value in values]


def test_inputs_outputs_parameters_and_values_keep_their_names():
    b = Builder("my model")
    x = b.input("images/0:raw", "f32[batch, 3]")
    w = b.parameter("layer.0.weight", np.ones((3, 2), np.float32))
    hidden = b.matmul(x, w, name="layer.0/MatMul_output")
    graph = b.build(**{"probabilities": b.softmax(hidden, name="inner")})
    model = checked(graph)
    assert model.graph.name == "my model"
    assert names(model.graph.input) == ["images/0:raw"]
    assert names(model.graph.output) == ["probabilities"]
    assert names(model.graph.initializer) == ["layer.0.weight"]
    assert [node.output[0] for node in model.graph.node] == [
        "layer.0/MatMul_output",
        "probabilities",
    ]
    assert_same(run_ort(model, {"images/0:raw": X}), run(graph, {"images/0:raw": X}))


def test_node_names_are_unique():
    b = Builder("many")
    x = b.input("x", "f32[batch, 3]")
    y = x
    for _ in range(4):
        y = b.gelu(y)
    model = checked(b.build(y))
    found = names(model.graph.node)
    assert len(set(found)) == len(found) and all(found)


def test_one_value_under_two_names_is_copied():
    b = Builder("twice")
    y = b.neg(b.input("x", "f32[2, 3]"))
    graph = b.build(first=y, second=y, neg=y)
    model = checked(graph)
    assert names(model.graph.output) == ["first", "second", "neg"]
    assert [node.op_type for node in model.graph.node] == ["Neg", "Identity", "Identity"]
    assert_same(run_ort(model, {"x": X}), run(graph, {"x": X}))


def test_inputs_and_parameters_can_be_outputs():
    b = Builder("through")
    x = b.input("x", "f32[2, 3]")
    w = b.parameter("w", X)
    graph = b.build(x, copy=x, weight=w)
    model = checked(graph)
    assert names(model.graph.output) == ["x", "copy", "weight"]
    assert_same(run_ort(model, {"x": X}), run(graph, {"x": X}))


def test_an_output_name_replaces_an_inner_name():
    b = Builder("clash")
    x = b.input("x", "f32[2, 3]")
    inner = b.neg(x, name="y")
    graph = b.build(y=b.abs(inner, name="z"))
    model = checked(graph)
    assert names(model.graph.output) == ["y"]
    assert_same(run_ort(model, {"x": X}), run(graph, {"x": X}))


def test_an_output_named_like_another_input_is_refused():
    b = Builder("clash")
    x, other = b.input("x", "f32[2, 3]"), b.input("other", "f32[2, 3]")
    with pytest.raises(ExportError, match=r"output 'x' has the name of .* input %x.* rename"):
        export_onnx(b.build(x=b.add(x, other)))


def test_a_parameter_without_a_value_is_refused():
    b = Builder("empty")
    w = b.parameter("w", type_="f32[3]")
    with pytest.raises(ExportError, match="parameter 'w' has no value"):
        export_onnx(b.build(y=b.neg(w)))


def test_states_are_pairs_of_input_and_output():
    b = Builder("running")
    x = b.input("x", "f32[3]")
    total = b.state("total", type_="f32[3]")
    count = b.state("count", np.array(5, np.int64))
    summed = b.add(total, x)
    b.update(total, summed)
    b.update(count, b.add(count, 1))
    graph = b.build(sum=summed)
    model = checked(graph)
    assert names(model.graph.input) == ["x", "total", "count"]
    assert names(model.graph.output) == ["sum", "total.next", "count.next"]
    initial = {tensor.name: tensor for tensor in model.graph.initializer}
    assert "count.initial" in initial and "total.initial" not in initial
    props = {p.key: p.value for p in model.metadata_props}
    assert json.loads(props["bitwright.states"]) == {"total": "total.next", "count": "count.next"}

    states = {}
    held = {"total": np.zeros(3, np.float32), "count": np.array(5, np.int64)}
    for step in range(3):
        x_now = np.full(3, step, np.float32)
        expected = run(graph, {"x": x_now}, states=states)
        found = run_ort(model, {"x": x_now, **held})
        np.testing.assert_array_equal(found["sum"], expected["sum"])
        held = {name: found[f"{name}.next"] for name in held}
    assert held["count"] == states["count"] == 8


def test_a_state_that_never_changes_is_an_output():
    b = Builder("constant")
    state = b.state("s", type_="f32[3]")
    model = checked(b.build(y=b.neg(state)))
    assert names(model.graph.output) == ["y", "s.next"]


def test_metadata_has_producer_source_and_bounds():
    b = Builder("meta")
    x = b.input("x", TensorType(f32, (symbol("batch", bound=64), 3)))
    b.meta = {"onnx.producer": "pytorch 2.9", "onnx.meta.author": "someone", "task": "test"}
    b.meta["onnx.doc"] = "what it does"
    model = checked(b.build(y=b.neg(x)))
    assert (model.producer_name, model.producer_version) == ("bitwright", bitwright.__version__)
    props = {p.key: p.value for p in model.metadata_props}
    assert props["author"] == "someone"
    assert model.doc_string == "what it does" and "bitwright.source.doc" not in props
    assert props["bitwright.source.producer"] == "pytorch 2.9"
    assert props["bitwright.source.task"] == "test"
    assert json.loads(props["bitwright.bounds"]) == {"batch": 64}


def test_provenance_is_that_of_the_first_source():
    b = Builder("meta")
    b.meta = {
        "onnx.producer": "bitwright 0.1.0",
        "onnx.meta.bitwright.source.producer": "pytorch 2.9",
    }
    model = checked(b.build(y=b.neg(b.input("x", "f32[3]"))))
    props = {p.key: p.value for p in model.metadata_props}
    assert props == {"bitwright.source.producer": "pytorch 2.9"}


def test_equal_constants_of_decompositions_are_shared():
    b = Builder("shared")
    x = b.input("x", "f32[3]")
    model = checked(b.build(y=b.gelu(b.gelu(x))))
    assert len(model.graph.initializer) == 3


def test_an_op_without_a_form_is_named_with_its_reason():
    b = Builder("complex numbers")
    z = b.complex(b.input("x", "f32[3]"), b.input("y", "f32[3]"), name="z")
    with pytest.raises(
        ExportError, match=r"complex %z: complex has no form in ONNX: no ONNX op .* complex numbers"
    ):
        export_onnx(b.build(z))


def test_an_output_of_unknown_rank_is_refused():
    b = Builder("rank")
    x = b.input("x", OpaqueType("tensor(f32)"))
    with pytest.raises(ExportError, match=r"the rank of 'x' is not known; expected a rank"):
        export_onnx(b.build(y=b.identity(x)))
