"""The verifier, the byte form, and graphs too deep for recursion."""

import copy
import pickle
import time

import numpy as np
import pytest

from bitwright.errors import ExportError, GraphError, ParseError
from bitwright.ir import container, parse, to_text
from bitwright.ir.dtype import DTYPES, dtype, f32
from bitwright.ir.graph import Graph, Node, sorted_nodes
from bitwright.ir.packing import pack_values, unpack_values
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.rewrite import Trace

VECTOR = TensorType(f32, (4,))


def broken(text):
    with pytest.raises(GraphError) as caught:
        verify(parse("graph @g {\n" + text + "\n}"))
    return str(caught.value)


def test_unknown_op_suggests():
    message = broken('input %x: f32[2]\n%y = rellu(%x): f32[2] at "net/act"\nreturn %y')
    assert "graph 'g', rellu %y (from net/act)" in message
    assert "no op is named 'rellu'" in message and "'relu'" in message


def test_wrong_arity():
    assert "operand 'y' is missing; expected x, y" in broken(
        "input %x: f32[2]\n%y = add(%x): f32[2]\nreturn %y"
    )
    assert "has too many operands" in broken(
        "input %x: f32[2]\n%y = relu(%x, %x): f32[2]\nreturn %y"
    )


def test_type_conflicts_name_expected_and_found():
    message = broken("input %x: f32[2]\ninput %z: f64[2]\n%y = add(%x, %z): f32[2]\nreturn %y")
    assert "different element types; expected f32[2], found f64[2]" in message
    message = broken("input %x: f32[2]\n%y = relu(%x): f32[3]\nreturn %y")
    assert "result %y has the wrong type; expected f32[2], found f32[3]" in message
    message = broken("input %x: f32[2]\ninput %z: f32[3]\n%y = add(%x, %z): f32[2]\nreturn %y")
    assert "[2] and [3] do not broadcast" in message


def test_attributes_are_checked():
    message = broken("input %x: f32[2]\n%y = softmax(%x) {axes=1}: f32[2]\nreturn %y")
    assert "has no attribute 'axes'" in message
    message = broken('input %x: f32[2]\n%y = softmax(%x) {axis="a"}: f32[2]\nreturn %y')
    assert "attribute 'axis' has the wrong kind of value; expected int" in message


def test_unbound_size():
    message = broken("input %x: f32[4]\n%y = reshape(%x) {shape=[n, 2]}: f32[n, 2]\nreturn %y")
    assert "size 'n'" in message


def test_two_outputs_with_one_name():
    assert "two outputs are named 'a'" in broken('input %x: f32[2]\nreturn %x as "a", %x as "a"')


def test_state_update_must_keep_the_type():
    message = broken(
        "state %s: f32[2]\n%y = reshape(%s) {shape=[2, 1]}: f32[2, 1]\nupdate %s = %y\nreturn"
    )
    assert "the update of %s changes its type; expected f32[2], found f32[2, 1]" in message


def test_foreign_values_and_cycles():
    x = Node("input", (), {}, (VECTOR,), ("x",))
    y = Node("relu", (x.outputs[0],), {}, (VECTOR,), ("y",))
    with pytest.raises(GraphError, match="not defined before this node"):
        verify(Graph("g", (y, x), (("y", y.outputs[0]),)))
    with pytest.raises(GraphError, match="is not a value of the graph"):
        verify(Graph("g", (x,), (("y", y.outputs[0]),)))
    object.__setattr__(y, "inputs", (y.outputs[0],))
    with pytest.raises(GraphError, match="a cycle runs through relu %y"):
        sorted_nodes([y.outputs[0]])


def test_constant_that_does_not_fit():
    node = Node("constant", (), {"value": np.zeros(3, "f4")}, (VECTOR,), ("c",))
    with pytest.raises(GraphError, match=r"does not fit; expected f32\[4\], found f32\[3\]"):
        verify(Graph("g", (node,), (("c", node.outputs[0]),)))


def test_a_node_found_right_is_still_looked_for_in_its_graph():
    """Nodes are looked at once, but where they stand every time."""
    b = Builder("g")
    x = b.input("x", "f32[n]")
    y = b.relu(x, name="y")
    graph = b.build(y=y)
    known = set()
    verify(graph, known)
    with pytest.raises(GraphError, match="not defined before"):
        verify(graph.with_(nodes=tuple(n for n in graph.nodes if n is not x.node)), known)
    with pytest.raises(GraphError, match="taken already"):
        verify(graph.with_(nodes=(*graph.nodes, y.node)), known)
    broken = Node("relu", (y,), {}, (TensorType(f32, (3,)),), ("z",))
    with pytest.raises(GraphError, match="wrong type"):
        verify(graph.with_(nodes=(*graph.nodes, broken)), known)


def test_byte_form_round_trips_and_maps_arrays(tmp_path):
    b = Builder("g")
    w = b.parameter("w", np.arange(10_000, dtype="f4").reshape(100, 100))
    graph = b.build(b.matmul(b.input("x", "f32[n, 100]"), w))
    path = tmp_path / "g.bw"
    graph.save(path)
    again = container.load(path)
    assert to_text(again) == to_text(graph)
    assert not again.value("w").node.attrs["value"].flags.owndata
    assert [p.name for p in tmp_path.iterdir()] == ["g.bw"]


@pytest.mark.parametrize("name", ["i4", "u4", "i2", "u2", "f4e2m1"])
@pytest.mark.parametrize("shape", [(0, 3), (7,), (33, 129)])
def test_small_values_are_packed_in_byte_form(name, shape, tmp_path, monkeypatch):
    b = Builder("g")
    bits = DTYPES[name].bits
    fields = np.random.default_rng(0).integers(0, 1 << bits, shape)
    values = unpack_values(
        pack_values(fields.reshape(-1).astype(np.uint8), bits), DTYPES[name], fields.size
    ).reshape(shape)
    graph = b.build(b.constant(values))
    path = tmp_path / "g.bw"
    graph.save(path)
    (found,) = (v.node.attrs["value"] for v in container.load(path).constants)
    assert found.dtype == values.dtype and found.shape == shape
    np.testing.assert_array_equal(found.view(np.uint8), values.view(np.uint8))
    assert to_text(container.load(path)) == to_text(graph)
    if values.size > 1000:
        assert path.stat().st_size < values.size * bits // 8 + 1000
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"packed"', b'"unpack"'))
        with pytest.raises(ParseError, match="unknown form"):
            container.load(path)
        path.write_bytes(data.replace(b"[33, 129]", b"[33, 139]"))
        with pytest.raises(ParseError):
            container.load(path)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage"])
def test_damaged_byte_form_is_an_error(tmp_path, damage):
    b = Builder("g")
    path = tmp_path / "g.bw"
    b.build(b.constant(np.arange(100, dtype="f4"))).save(path)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[8] ^= 0xFF
    else:
        data = bytearray() if damage == "empty" else bytearray(b"BWGRAPH1" + b"\xff" * 64)
    path.write_bytes(data)
    with pytest.raises(ParseError):
        container.load(path)


def test_unknown_suffix_and_unwritable_folder(tmp_path):
    graph = Builder("g").build()
    with pytest.raises(ExportError, match=r"no format is known for 'g.xyz'; expected .onnx"):
        graph.save("g.xyz")
    with pytest.raises(ExportError, match="cannot write"):
        graph.save(tmp_path / "missing" / "g.bw")


def chain(length):
    b = Builder("chain")
    y = b.input("x", "f32[n, 8]")
    for i in range(length):
        y = b.neg(y) if i % 2 else b.add(y, 1.0)
    return b.build(y)


def deep_tree(depth):
    """An expression whose every level reads the level below twice."""
    b = Builder("tree")
    y = b.input("x", "f32[n]")
    for _ in range(depth):
        y = b.mul(b.tanh(y), b.sigmoid(y))
    return b.build(y)


@pytest.mark.parametrize("graph", [chain(10_000), deep_tree(3_000)], ids=["chain", "tree"])
def test_large_graphs_go_through_every_stage(graph):
    """Recursion would fail at this depth; quadratic work would not end in a test's time."""
    start = time.process_time()
    text = to_text(graph)
    again = verify(parse(text))
    verify(canonicalize(again, Trace()))
    assert time.process_time() - start < 60  # a guard against quadratic work, not a timing


def test_copies_of_an_element_type_are_the_type_itself():
    for element in DTYPES.values():
        assert pickle.loads(pickle.dumps(element)) is element
        assert copy.deepcopy(element) is element and copy.copy(element) is element
        assert dtype(element.name) is element
