"""The ops that `TypedBuilder` declares are those with several results."""

from bitwright.frontend.builder import TypedBuilder
from bitwright.ops.core.registry import all_ops

ANY_NUMBER = {"if", "loop", "scan", "fallback", "custom"}
"""Ops whose number of results depends on the node; importers make them with `Builder.node`."""


def result_counts(opdef):
    for sample in opdef.samples():
        b = TypedBuilder()
        operands = [None if array is None else b.constant(array) for array in sample.inputs]
        yield len(b.node(opdef.name, operands, sample.attrs, []).outputs)


def test_ops_with_several_results_are_declared():
    ops = [opdef for opdef in all_ops().values() if opdef.name not in ANY_NUMBER]
    several = {opdef.name for opdef in ops if max(result_counts(opdef), default=1) > 1}
    assert several == set(TypedBuilder.__annotations__)


def test_results_are_those_of_the_builder():
    b = TypedBuilder()
    x = b.input("x", "f32[4]")
    assert b.relu(x).name == "relu"
    values, indices = b.top_k(x, k=2)
    assert (str(values.type), str(indices.type)) == ("f32[2]", "i64[2]")
    assert [v.name for v in b.results("neg", x)] == ["neg"]
