"""If, loop and scan: what runs, what comes out, and which sizes are known outside."""

import numpy as np
import pytest
from single_op import evaluate

from bitwright.errors import InferenceError, RunError
from bitwright.ir import OpaqueType, parse, symbol, to_text
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run

TRUE, FALSE = np.array(True), np.array(False)


def branch(name, op, left="f32[n]", right="f32[n]"):
    b = Builder(name)
    return b.build(result=b.op(op, b.input("x", left), b.input("y", right)))


def loop_body(make, *types, captures=()):
    """make(b, step, going, *values) -> the body's results: condition, carried, rows."""
    b = Builder("body")
    values = [b.input("step", "i64[]"), b.input("going", "bool[]")]
    values += [b.input(f"v{i}", t) for i, t in enumerate([*types, *captures])]
    for i, result in enumerate(make(b, *values)):
        b.output(f"out{i}", b.identity(result))
    return b.build()


def counting(b, step, going, x, limit):
    """Doubles x while step < limit; rows are x before and the step."""
    return b.lt(step, limit), b.add(x, x), x, step


COUNTING = {"body": loop_body(counting, "f32[3]", "i64[]"), "carried": 1}
X = np.array([1, 2, 3], np.float32)


@pytest.mark.parametrize("condition", [TRUE, FALSE, np.array([True])])
def test_if_runs_one_branch(condition):
    bodies = {"then": branch("then", "add"), "else": branch("else", "mul")}
    found = evaluate("if", condition, X, X, **bodies)
    assert found.tolist() == ((X + X) if condition else (X * X)).tolist()


def test_if_does_not_run_the_other_branch():
    """The branch not taken divides by zero, which is an error for integers."""
    bodies = {
        "then": branch("t", "add", "i64[]", "i64[]"),
        "else": branch("e", "div", "i64[]", "i64[]"),
    }
    assert evaluate("if", TRUE, np.array(3), np.array(0), **bodies) == 3
    with pytest.raises(RunError, match="divided by zero"):
        evaluate("if", FALSE, np.array(3), np.array(0), **bodies)


def if_type(*captures, **bodies):
    b = Builder()
    condition = b.input("condition", "bool[]")
    values = [b.input(f"x{i}", t) for i, t in enumerate(captures)]
    return str(b.if_(condition, *values, **bodies).type)


def test_if_sizes_are_those_both_branches_agree_on():
    same = {"then": branch("then", "add"), "else": branch("else", "mul")}
    assert if_type("f32[rows]", "f32[rows]", **same) == "f32[rows]"
    b = Builder("longer")
    longer = b.build(result=b.concat(b.input("x", "f32[n]"), b.input("y", "f32[n]"), axis=0))
    other = {"then": branch("then", "add"), "else": longer}
    assert if_type("f32[rows]", "f32[rows]", **other) == "f32[u0]"


def test_if_of_different_ranks_is_a_value_for_fallbacks():
    b = Builder("table")
    table = b.build(result=b.reshape(b.input("x", "f32[6]"), shape=[2, 3]))
    b = Builder("list")
    bodies = {"then": table, "else": b.build(result=b.input("x", "f32[6]"))}
    assert if_type("f32[6]", **bodies) == "host<tensor(f32)>"
    found = evaluate("if", TRUE, np.zeros(6, np.float32), **bodies)
    assert found.shape == (2, 3)


@pytest.mark.parametrize(
    "trip_count, condition, rounds",
    [
        (5, TRUE, 3),  # the body's condition ends it
        (2, TRUE, 2),
        (5, None, 5),  # without a condition, the body's is not looked at
        (None, TRUE, 3),
        (None, None, 3),  # else it would never end
        (0, TRUE, 0),
        (-1, None, 0),
        (5, FALSE, 0),
    ],
)
def test_loop_modes(trip_count, condition, rounds):
    trip_count = None if trip_count is None else np.array(trip_count)
    x, rows, steps = evaluate("loop", trip_count, condition, X, np.array(2), **COUNTING)
    assert x.tolist() == (X * 2**rounds).tolist()
    assert steps.tolist() == list(range(rounds)) and steps.dtype == np.int64
    assert rows.shape == (rounds, 3) and rows.dtype == np.float32
    assert rows.tolist() == [(X * 2**i).tolist() for i in range(rounds)]


def loop_types(body, *operands, carried):
    b = Builder()
    values = [b.input(f"x{i}", t) for i, t in enumerate(operands)]
    node = b.node("loop", [np.array(3), None, *values], {"body": body, "carried": carried}, [])
    graph = verify(b.build(*node.outputs))
    assert to_text(parse(to_text(graph))) == to_text(graph)
    return [str(t) for t in node.types]


def test_a_carried_size_that_lasts_is_known_outside():
    body = loop_body(lambda b, step, going, x: (going, b.add(x, x), x), "f32[n, 2]")
    assert loop_types(body, "f32[rows, 2]", carried=1) == ["f32[rows, 2]", "f32[u0, rows, 2]"]


def test_a_carried_size_that_grows_is_unknown_outside():
    def grow(b, step, going, x, row):
        return going, b.concat(x, row, axis=0), b.concat(row, row, axis=0)

    body = loop_body(grow, "f32[n, k]", captures=["f32[1, k]"])
    found = loop_types(body, "f32[rows, 8]", "f32[1, 8]", carried=1)
    assert found == ["f32[u0, 8]", "f32[u1, 2, 8]"]
    x, rows = evaluate(
        "loop", np.array(3), None, np.zeros((0, 2), np.float32), np.ones((1, 2), np.float32),
        body=body, carried=1,
    )  # fmt: skip
    assert x.shape == (3, 2) and rows.shape == (3, 2, 2)


def test_sizes_that_change_places_are_unknown_outside():
    body = loop_body(lambda b, step, going, x, y: (going, y, x), "f32[n]", "f32[m]")
    assert loop_types(body, "f32[p]", "f32[q]", carried=2) == ["f32[u0]", "f32[u1]"]
    assert loop_types(body, "f32[p]", "f32[p]", carried=2) == ["f32[p]", "f32[p]"]


def test_a_size_that_a_grown_one_feeds_is_unknown_too():
    def grow(b, step, going, x, y):
        return going, b.concat(x, x, axis=0), x

    body = loop_body(grow, "f32[n]", "f32[m]")
    assert loop_types(body, "f32[p]", "f32[p]", carried=2) == ["f32[u0]", "f32[u1]"]


def test_a_size_from_outside_the_body_keeps_its_name():
    """The body makes something of the outer size `rows` without an operand that has it."""
    b = Builder("body")
    b.input("step", "i64[]")
    going, x = b.input("going", "bool[]"), b.input("x", "f32[1]")
    row = b.expand(x, shape=[symbol("rows")])
    body = b.build(going=going, x=x, row=row)
    b = Builder()
    b.input("like", "f32[rows]")
    node = b.node(
        "loop", [np.array(3), None, b.input("x", "f32[1]")], {"body": body, "carried": 1}, []
    )
    assert [str(t) for t in node.types] == ["f32[1]", "f32[u0, rows]"]
    feeds = {"like": np.zeros(4, np.float32), "x": np.zeros(1, np.float32)}
    found = run(verify(b.build(*node.outputs)), feeds)
    assert [v.shape for v in found.values()] == [(1,), (3, 4)]


def test_what_the_data_inside_decides_is_unknown_outside():
    def pick(b, step, going, x):
        return going, x, b.nonzero(x)

    body = loop_body(pick, "f32[n]")
    assert loop_types(body, "f32[p]", carried=1) == ["f32[p]", "i64[u0, 1, u1]"]
    _, empty = evaluate("loop", np.array(0), None, X, body=body, carried=1)
    assert empty.shape[:2] == (0, 1) and empty.dtype == np.int64


def test_rows_of_changing_shape_are_an_error():
    def grow(b, step, going, x):
        doubled = b.concat(x, x, axis=0)
        return going, doubled, doubled

    body = loop_body(grow, "f32[n]")
    with pytest.raises(RunError, match=r"stacked result 0 changes its shape.*\[6\] and \[12\]"):
        evaluate("loop", np.array(2), None, X, body=body, carried=1)


def test_nested_loops():
    """sum over i < 3 of sum over j < i of (i * j + 1)"""
    inner = loop_body(
        lambda b, j, going, total, i: (going, b.add(total, b.add(b.mul(i, j), 1))),
        "i64[]",
        captures=["i64[]"],
    )
    outer = loop_body(
        lambda b, i, going, total: (going, b.loop(i, None, total, i, body=inner, carried=1)),
        "i64[]",
    )
    found = evaluate("loop", np.array(4), None, np.array(0), body=outer, carried=1)
    assert found == sum(i * j + 1 for i in range(4) for j in range(i))


def test_opaque_values_are_carried():
    """A list that appends its own items; only the interpreter reads it."""
    b = Builder("body")
    b.input("step", "i64[]")
    going, items = b.input("going", "bool[]"), b.input("items", OpaqueType("seq(f32)"))
    body = b.build(going=going, items=items)
    b = Builder()
    items = b.input("items", OpaqueType("seq(f32)"))
    graph = verify(b.build(result=b.loop(np.array(2), None, items, body=body, carried=1)))
    assert run(graph, {"items": [X]})["result"] == [X]
    with pytest.raises(InferenceError, match="takes tensors only"):
        b.add(items, items)


def running_sum(b, total, x, factor):
    added = b.add(total, b.mul(x, factor))
    return added, added


def scan_body(make, *types):
    b = Builder("body")
    values = [b.input(f"v{i}", t) for i, t in enumerate(types)]
    for i, result in enumerate(make(b, *values)):
        b.output(f"out{i}", b.identity(result))
    return b.build()


SUM = {"body": scan_body(running_sum, "f32[n]", "f32[n]", "f32[]"), "carried": 1, "scanned": 1}


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("output_axis", [0, 1, -1])
@pytest.mark.parametrize("prepend", [0, 1])
def test_scan_axes_and_directions(axis, reverse, output_axis, prepend):
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    start, factor = np.array([1, 2], np.float32), np.float32(3)
    expected = start + 3 * np.cumsum(x[::-1] if reverse else x, axis=0)
    total, rows = evaluate(
        "scan",
        start,
        np.moveaxis(x, 0, axis),
        factor,
        **SUM,
        input_axes=[axis],
        input_directions=[reverse],
        output_axes=[output_axis],
        output_directions=[prepend],
    )
    assert total.tolist() == expected[-1].tolist()
    stacked = expected[::-1] if prepend else expected
    assert np.moveaxis(rows, output_axis, 0).tolist() == stacked.tolist()


def test_scan_of_nothing():
    start = np.array([1, 2], np.float32)
    total, rows = evaluate("scan", start, np.zeros((0, 2), np.float32), np.float32(3), **SUM)
    assert total.tolist() == [1, 2] and rows.shape == (0, 2) and rows.dtype == np.float32


def test_scan_of_several_sequences():
    def step(b, x, y):
        return b.mul(x, y), b.add(x, y)

    body = scan_body(step, "f32[]", "f32[]")
    x, y = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32) + 5
    products, sums = evaluate("scan", x, y, body=body, carried=0, scanned=2)
    assert products.tolist() == (x * y).tolist() and sums.tolist() == (x + y).tolist()
    with pytest.raises(InferenceError, match="scanned axis of operand 1"):
        evaluate("scan", x, y[:3], body=body, carried=0, scanned=2)


def test_scan_sizes_stay_symbolic():
    b = Builder()
    values = [b.input("total", "f32[k]"), b.input("x", "f32[steps, k]"), b.input("f", "f32[]")]
    node = b.node("scan", values, {**SUM, "output_axes": [1]}, [])
    assert [str(t) for t in node.types] == ["f32[k]", "f32[k, steps]"]


@pytest.mark.parametrize(
    "operands, message",
    [
        (["i64[3]", "i64[]"], r"input %v0 .*expected f32\[3\], found i64\[3\]"),
        (["f32[3, 1]", "i64[]"], r"expected f32\[3\], found f32\[3, 1\]"),
        (["f32[4]", "i64[]"], r"expected f32\[3\], found f32\[4\]"),
        (["f32[3]"], "number of inputs than it is given; expected 4, found 3"),
        ([], "too few operands; expected 1 carried, found 0"),
    ],
)
def test_operands_that_do_not_fit_the_body(operands, message):
    b = Builder()
    values = [b.input(f"x{i}", t) for i, t in enumerate(operands)]
    with pytest.raises(InferenceError, match=message):
        b.loop(np.array(3), None, *values, **COUNTING)


def test_a_body_that_changes_rank_is_an_error():
    body = loop_body(lambda b, step, going, x: (going, b.reshape(x, shape=[3, 1])), "f32[3]")
    with pytest.raises(InferenceError, match="changes the rank of input %v0"):
        loop_types(body, "f32[3]", carried=1)


def test_a_condition_must_be_one_boolean():
    bodies = {"then": branch("then", "add"), "else": branch("else", "mul")}
    with pytest.raises(InferenceError, match="the condition"):
        evaluate("if", np.array([True, False]), X, X, **bodies)
    with pytest.raises(InferenceError, match="the condition"):
        evaluate("if", np.array(1), X, X, **bodies)
