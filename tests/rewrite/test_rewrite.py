"""The rewrite engine: patterns, refusals, names, termination."""

import numpy as np
import pytest

from bitwright.errors import RewriteError
from bitwright.ir import parse, to_text
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.manager import History, run_passes
from bitwright.rewrite import Rule, Trace, rewrite

RELU_OF_RELU = Rule("relu-of-relu", lambda op, x: op.relu(op.relu(x)), lambda op, x: op.relu(x))


def graph(text):
    return verify(parse("graph @g {\n" + text + "\n}"))


def ops(found):
    return [node.op for node in found.nodes if not node.is_boundary]


def test_a_chain_collapses_and_the_last_name_and_place_survive():
    b = Builder("g")
    y = b.input("x", "f32[n]")
    for i in range(5):
        with b.at(f"layer {i}"):
            y = b.relu(y, name=f"r{i}")
    trace = Trace()
    found = verify(rewrite(b.build(y), [RELU_OF_RELU], trace))
    assert ops(found) == ["relu"]
    node = found.outputs[0][1].node
    assert node.name == "r4" and node.loc == "layer 4"
    assert [e.node for e in trace.events if e.fired] == ["r1", "r2", "r3", "r4"]


def test_commutative_ops_match_in_either_order():
    rule = Rule("add-neg", lambda op, x, y: op.add(x, op.neg(y)), lambda op, x, y: op.sub(x, y))
    for order in ("%a, %b", "%b, %a"):
        found = rewrite(
            graph(
                f"input %a: f32[2]\ninput %c: f32[2]\n%b = neg(%c): f32[2]\n"
                f"%y = add({order}): f32[2]\nreturn %y"
            ),
            [rule],
        )
        assert ops(found) == ["sub"]
        assert [v.name for v in found.value("y").node.inputs] == ["a", "c"]


def test_a_variable_that_stands_twice_must_be_one_value():
    rule = Rule("double", lambda op, x: op.add(x, x), lambda op, x: op.mul(x, 2.0))
    assert ops(rewrite(graph("input %x: f32[2]\n%y = add(%x, %x): f32[2]\nreturn %y"), [rule])) == [
        "mul"
    ]
    other = graph("input %x: f32[2]\ninput %z: f32[2]\n%y = add(%x, %z): f32[2]\nreturn %y")
    assert ops(rewrite(other, [rule])) == ["add"]


def test_refusals_carry_their_reason():
    rule = Rule(
        "softmax-drop",
        lambda op, x, a: op.softmax(x, axis=a),
        lambda op, x: x,
        unless=lambda m: m.a != 0 and f"axis {m.a} is not the first",
    )
    trace = Trace()
    rewrite(
        graph("input %x: f32[2, 3]\n%y = softmax(%x) {axis=1}: f32[2, 3]\nreturn %y"), [rule], trace
    )
    assert [str(e) for e in trace.events] == [
        ": softmax-drop on %y refused: axis 1 is not the first"
    ]


def test_a_plan_is_computed_once_per_match():
    planned = []

    def plan(m):
        planned.append(m.root.name)
        return f"axis {m.a} is not the first" if m.a else -1.0

    rule = Rule.from_plan(
        "softmax-scale",
        lambda op, x, a: op.softmax(x, axis=a),
        plan,
        lambda op, m, factor: op.mul(m.x, factor),
    )
    trace = Trace()
    text = "%y = softmax(%x) {axis=1}: f32[2, 3]\n%z = softmax(%y) {axis=0}: f32[2, 3]\nreturn %z"
    found = rewrite(graph(f"input %x: f32[2, 3]\n{text}"), [rule], trace)
    assert ops(found) == ["softmax", "mul"] and planned == ["y", "z", "y"]
    assert [event.reason for event in trace.events] == ["axis 1 is not the first", ""]


def test_a_replacement_of_another_type_is_refused():
    rule = Rule("wrong", lambda op, x: op.neg(x), lambda op, x: op.cast(x, to="f16"))
    trace = Trace()
    found = rewrite(graph("input %x: f32[2]\n%y = neg(%x): f32[2]\nreturn %y"), [rule], trace)
    assert ops(found) == ["neg"]
    assert trace.events[0].reason == "types differ: f32[2] would become f16[2]"


def test_optional_operands_any_operands_and_bound_nodes():
    keep = Rule(
        "drop-high",
        lambda op, x, lo, hi: op.clip(x, op.maybe(lo), op.maybe(hi)),
        lambda op, x, lo: op.clip(x, lo),
        unless=lambda m: m.hi is None and "there is no upper bound",
    )
    text = "input %x: f32[2]\nconst %h: f32[] = 1.0\n%y = clip(%x, none, %h): f32[2]\nreturn %y"
    assert len(rewrite(graph(text), [keep]).value("y").node.inputs) == 1
    single = Rule(
        "unjoin",
        lambda op: op.concat(..., as_="joined"),
        lambda op, m: m.joined.inputs[0],
        unless=lambda m: len(m.joined.inputs) != 1 and "several parts",
    )
    text = "input %x: f32[2]\n%y = concat(%x) {axis=0}: f32[2]\nreturn %y"
    assert ops(rewrite(graph(text), [single])) == []


def test_one_result_of_several():
    rule = Rule("second", lambda op, x: op.relu(op.split(x)[1]), lambda op, x, m: m.root.inputs[0])
    text = (
        "input %x: f32[4]\n%a, %b = split(%x) {axis=0, sizes=[2, 2]}: f32[2], f32[2]\n"
        "%p = relu(%a): f32[2]\n%q = relu(%b): f32[2]\nreturn %p, %q"
    )
    found = rewrite(graph(text), [rule])
    assert [v.name for _, v in found.outputs] == ["p", "b"]


def test_rules_that_undo_each_other_are_stopped_and_named():
    rules = [
        Rule("there", lambda op, x: op.neg(x), lambda op, x: op.abs(x)),
        Rule("back", lambda op, x: op.abs(x), lambda op, x: op.neg(x)),
    ]
    with pytest.raises(
        RewriteError, match=r"keep undoing each other; found there \(\d+ times\), back"
    ):
        rewrite(graph("input %x: f32[2]\n%y = neg(%x): f32[2]\nreturn %y"), rules)


def test_bodies_are_rewritten():
    b = Builder("g")
    x, c = b.input("x", "f32[n]"), b.input("c", "bool[]")
    bodies = {}
    for name in ("then", "else"):
        inner = Builder(name, parent=b)
        a = inner.input("a", "f32[n]")
        bodies[name] = inner.build(inner.relu(inner.relu(a)))
    found = verify(rewrite(b.build(b.op("if", c, x, **bodies)), [RELU_OF_RELU]))
    assert all(ops(body) == ["relu"] for _, n in found.walk() for body in n.bodies.values())


def test_nothing_to_do_returns_an_equal_graph():
    before = graph("input %x: f32[2]\n%y = neg(%x): f32[2]\nreturn %y")
    assert to_text(rewrite(before, [RELU_OF_RELU])) == to_text(before)


def test_a_pass_that_breaks_the_graph_is_named():
    def break_names(found, trace):
        node = found.nodes[-1]
        return found.with_(nodes=(*found.nodes, node.with_()))

    with pytest.raises(RewriteError, match=r"pass break_names failed: .*It ran after: input"):
        run_passes(graph("input %x: f32[2]\n%y = neg(%x): f32[2]\nreturn %y"), [break_names])


def test_a_pass_that_returns_nothing_is_named():
    with pytest.raises(RewriteError, match=r"<lambda> failed: it returned no graph.*NoneType"):
        run_passes(graph("input %x: f32[2]\nreturn %x"), [lambda found, trace: None])


def test_every_stage_is_dumped(tmp_path, monkeypatch):
    def keep(found, trace):
        return found

    monkeypatch.setenv("BITWRIGHT_DUMP", str(tmp_path / "stages"))
    before = graph("input %x: f32[2]\n%y = neg(%x): f32[2]\nreturn %y")
    run_passes(before, [keep], History())
    files = sorted(p.name for p in (tmp_path / "stages").iterdir())
    assert files == ["00-g-input.txt", "01-g-keep.txt"]
    assert parse((tmp_path / "stages" / files[1]).read_text()).name == "g"


def test_interpreter_runs_rewritten_state():
    b = Builder("g")
    s = b.state("s", np.zeros(2, np.float32))
    b.update(s, b.relu(b.relu(b.add(s, 1.0))))
    found = verify(rewrite(b.build(s), [RELU_OF_RELU]))
    assert len(found.updates) == 1 and found.updates[0][0] is found.states[0]
