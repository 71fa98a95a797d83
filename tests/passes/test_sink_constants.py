"""Constants that a single branch reads move into it."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.sink_constants import sink_constants
from bitwright.pipeline import INFERENCE


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def branches():
    """One weight per branch, and one that both read."""
    types = {"x": "f32[n, 8]", "own": "f32[8, 8]", "other": "f32[8, 8]", "both": "f32[8, 8]"}
    bodies = {}
    for name, weight in (("then", "own"), ("else", "other")):
        inner = bw.Builder(name)
        given = {key: inner.input(key, type_) for key, type_ in types.items()}
        y = inner.matmul(given["x"], given[weight], name="y")
        bodies[name] = inner.build(inner.matmul(y, given["both"], name="z"))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[n, 8]")
    weights = [b.parameter(f"{key}.weight", draw(8, 8, seed=i)) for i, key in enumerate("abc")]
    return b.build(y=b.if_(flag, x, *weights, **bodies))


@pytest.mark.parametrize("flag", [False, True])
def test_each_branch_gets_its_own_weight(flag):
    graph = branches()
    made = run_passes(graph, (*INFERENCE, sink_constants))
    (choice,) = (node for node in made.nodes if node.op == "if")
    assert [value.name for value in choice.inputs] == ["flag", "x", "c.weight"]
    constants = {
        name: [node.name for node in body.nodes if node.op == "constant"]
        for name, body in choice.bodies.items()
    }
    assert constants == {"then": ["a.weight"], "else": ["b.weight"]}
    assert not {"a.weight", "b.weight"} & {node.name for node in made.nodes}
    feeds = {"flag": np.array(flag), "x": draw(3, 8, seed=5)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(graph, feeds)["y"], rtol=1e-6)


def test_a_graph_without_such_constants_stays_as_it_is():
    b = bw.Builder("none")
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 8]"), draw(8, 8)))
    assert run_passes(graph, (sink_constants,)) is graph


def test_branches_with_captured_weights_are_quantized():
    graph, rng = branches(), np.random.default_rng(0)
    data = [
        {"flag": np.array(rng.uniform() < 0.5), "x": rng.normal(size=(8, 8)).astype(np.float32)}
        for _ in range(16)
    ]
    report = bw.quantize(graph, data).report
    schemes = {layer.name.split("/")[-1]: layer.scheme for layer in report.layers}
    assert schemes["a"] == schemes["b"] == "dynamic_per_token"
    (why,) = {layer.reason for layer in report.layers if layer.scheme == "float"}
    assert "not an f32 constant" in why  # the weight of both: not "in a loop body"
