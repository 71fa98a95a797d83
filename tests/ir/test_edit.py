"""The graph editor shares unchanged nodes and graphs, with their cached facts."""

import numpy as np
import pytest

from bitwright.errors import GraphError
from bitwright.ir.edit import map_bodies, prune, rebuild, replace_inputs, replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.rewrite import Rule, Trace, rewrite


def model() -> Graph:
    b = Builder("model")
    x = b.input("x", "f32[n, 4]")
    left = b.relu(x, name="left")
    right = b.tanh(b.neg(x, name="negated"), name="right")
    return b.build(y=b.add(left, right, name="sum"), z=b.reshape(left, shape=(4, x.shape[0])))


def test_a_graph_of_which_nothing_changes_stays_the_same_object():
    graph = canonicalize(model(), Trace())
    assert canonicalize(graph, Trace()) is graph
    assert prune(graph) is graph and rebuild(graph, graph.nodes, {}) is graph
    assert replace_nodes(graph, lambda node: node) is graph
    assert map_bodies(graph, lambda body: body) is graph
    assert rewrite(graph, [Rule("never", lambda op, x: op.exp(x), lambda op, x: x)]) is graph


def test_only_readers_of_a_change_are_rebuilt():
    graph = model()
    changed = replace_nodes(graph, lambda n: n.with_(op="sigmoid") if n.op == "tanh" else n)
    kept = {node.name for node in changed.nodes} - {"right", "sum"}
    assert all(changed.values[name] is graph.values[name] for name in kept)
    assert changed.values["sum"].node.inputs[1] is changed.values["right"]
    assert graph.values["right"].node.op == "tanh"


def test_a_result_that_another_value_takes_over_is_a_change():
    b = Builder("forward")
    x = b.input("x", "f32[3]")
    graph = b.build(y=b.identity(b.relu(x)))
    gone = rewrite(graph, [Rule("identity", lambda op, x: op.identity(x), lambda op, x: x)])
    assert [node.op for node in gone.nodes] == ["input", "relu"]
    assert gone.outputs[0][1].node.op == "relu"


def test_attributes_that_stay_are_not_worked_out_again_and_others_are():
    node = model().outputs[1][1].node
    (symbol,) = node.attr_symbols
    moved = node.with_(names=("other",))
    assert moved.__dict__["attr_symbols"] is node.attr_symbols and symbol.name == "n"
    assert moved.attrs_text == node.attrs_text
    flat = node.with_(attrs={"shape": (8,)})
    assert not flat.attr_symbols and flat.attrs_text != node.attrs_text
    with pytest.raises(TypeError, match="'attr'"):
        node.with_(attr={})


def test_attributes_are_told_apart_by_kind_and_content():
    def text(value: object) -> str:
        return Node("custom", (), {"a": value}, (), ()).attrs_text

    large = np.zeros(1 << 16, np.float32)
    assert len({text(1), text(1.0), text(True), text("1"), text((1,)), text(None)}) == 6
    assert text(np.arange(3)) == text(np.arange(3)) != text(np.arange(3.0))
    assert text(large) == text(large) != text(large.copy())


def test_a_verified_graph_is_known_and_a_changed_one_is_looked_at():
    known: set[object] = set()
    graph = verify(model(), known)
    assert verify(graph, known) is graph
    wrong = replace_nodes(graph, lambda n: n.with_(op="equal") if n.op == "add" else n)
    with pytest.raises(GraphError, match="equal %sum"):
        verify(wrong, known)


def test_a_node_without_replaced_operands_is_itself():
    graph = model()
    left, right = graph.values["left"], graph.values["right"]
    total = graph.values["sum"].node
    assert replace_inputs(total, {}) is total
    assert replace_inputs(total, {right: left}).inputs == (left, left)
