"""Print and parse: exact round trips, and errors that name the place."""

import numpy as np
import pytest

from bitwright.errors import ParseError
from bitwright.ir import dtype, parse, parse_type, symbol, to_text
from bitwright.ir.dtype import DTYPES
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run


def everything() -> Graph:
    """One of each kind of line."""
    b = Builder("odd name/1")
    b.meta["producer"] = 'a "quoted" tool\n'
    x = b.input("x", TensorType(dtype("f32"), (symbol("batch"), symbol("seq", 512), 4)))
    w = b.parameter("layer.0/weight:0", np.random.default_rng(0).normal(size=(4, 8)).astype("f4"))
    b.parameter("frozen", np.ones(3, "f4"), trainable=False)
    b.parameter("empty", type_="f16[3, 3]")
    state = b.state("memory", np.zeros((2, 2), "f4"))
    with b.at('model.onnx: "node" 7'):
        y = b.matmul(x, w, name="y")
    b.update(state, b.add(state, 1.0))
    first, _ = b.split(y, axis=-1, sizes=[3, 5], outputs=["first", "second part"])
    b.output("the result", first)
    return b.build(y)


def test_everything_round_trips():
    graph = verify(everything())
    text = to_text(graph)
    again = verify(parse(text))
    assert to_text(again) == text
    assert again.meta == graph.meta
    assert [n for n, _ in again.outputs] == ["the result", "y"]
    assert again.value("y").node.loc == 'model.onnx: "node" 7'
    assert again.inputs[0].shape[1].symbols == {next(iter(symbol("seq", 512).symbols))}
    assert not again.value("frozen").node.attrs["trainable"]
    np.testing.assert_array_equal(
        again.value("layer.0/weight:0").node.attrs["value"],
        graph.value("layer.0/weight:0").node.attrs["value"],
    )


def test_text_without_data_is_what_printing_shows():
    assert "data {" not in str(everything())
    with pytest.raises(ParseError, match="the data section has no #"):
        parse(str(everything()))


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "string"])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_constants_of_every_type_are_exact(name, count):
    element = DTYPES[name]
    rng = np.random.default_rng(count)
    if element.is_integer:
        low, high = max(element.min, -(2**62)), min(element.max, 2**62)
        array = rng.integers(low, high, count, endpoint=True).astype(element.numpy)
    else:
        array = rng.normal(size=count).astype(element.numpy)
    b = Builder()
    graph = b.build(b.constant(array))
    back = parse(to_text(graph)).constants[0].node.attrs["value"]
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()


def test_special_floats_and_strings():
    b = Builder()
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45, 0.1], np.float32)
    words = np.array(["a", 'quote " and \\', "\nline"], dtype=object)
    graph = b.build(b.constant(special, name="s"), b.constant(words, name="w"))
    again = parse(to_text(graph))
    assert again.value("s").node.attrs["value"].tobytes() == special.tobytes()
    assert again.value("w").node.attrs["value"].tolist() == words.tolist()


def test_bodies_round_trip():
    text = """graph @outer {
  input %c: bool[]
  input %x: f32[n]
  %y = if(%c, %x) {else=graph @no {
    input %a: f32[n]
    %r = neg(%a): f32[n]
    return %r
  }, then=graph @yes {
    input %a: f32[n]
    %r = relu(%a): f32[n]
    return %r
  }}: f32[n]
  return %y
}
"""
    graph = verify(parse(text))
    assert to_text(graph) == text
    feeds = {"c": np.array(False), "x": np.array([1, -2], np.float32)}
    assert run(graph, feeds)["y"].tolist() == [-1, 2]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1, column 1: the text does not parse; expected 'graph', found the end"),
        ("graph @g { return %x }", "%x is used before it is defined"),
        ("graph @g { input %x: f33[2] return %x }", "no element type is named 'f33'"),
        ("graph @g { input %x: f32[-2] return %x }", "negative size -2"),
        ("graph @g { const %c: f32[2] = [1.0] return %c }", "does not fit f32[2]"),
        ("graph @g { const %c: f32[n] = [1.0] return %c }", "cannot have a value"),
        ("graph @g { const %c: f32[] return %c }", "expected '=' and a value"),
        ("graph @g { input %x: f32[] input %x: f32[] return %x }", "%x is defined twice"),
        ("graph @g { %y, %z = split(): f32[] return %y }", "2 results and 1 types"),
        ("graph @g { ~ }", "unexpected character '~'"),
        ("graph @g { return } extra", "expected the end of the text, found 'extra'"),
        ("graph @g { input %x: f32[(((n)] return %x }", "expected ')'"),
        ("graph @g { input %x: f32[n//0] return %x }", "divided by zero"),
        ("graph @g { const %c: f32[99] = #00ff return %c } data {", "the text does not parse"),
        (
            'graph @g { const %c: f32[2] = #0f return %c } data { #0f = "!" }',
            "cannot be decoded",
        ),
    ],
)
def test_malformed_text_is_a_clear_error(text, message):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("opening", ["[", "graph @g { %x = a() {b="])
def test_deep_nesting_is_refused(opening):
    with pytest.raises(ParseError):
        parse("graph @g { %x = op() {a=" + opening * 10_000)


def test_types_parse():
    assert str(parse_type("f32[batch, 2*seq, 7]")) == "f32[batch, 2*seq, 7]"
    assert str(parse_type("host<seq(tensor(float))>")) == "host<seq(tensor(float))>"
    with pytest.raises(ParseError):
        parse_type("f32[2] f32")
