"""Small valid files with expensive computations: importing them is cheap."""

import os
import resource
import time
from itertools import pairwise

import numpy as np
import pytest
from fuzz_seeds import FLOAT, INT64, info, model, node
from onnx import numpy_helper

import bitwright
from bitwright.errors import BitwrightError, ImportModelError

SECONDS, MEGABYTES = 5.0, 300
X = [info("x", FLOAT, ["n", "m"])]
Y = [info("y", FLOAT, None)]


def constant(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def chain(op_type, count, start):
    """A value combined with itself repeatedly."""
    names = [start, *(f"v{i}" for i in range(count))]
    return [node(op_type, f"{a} {a}", b) for a, b in pairwise(names)], names[-1]


def computed_shape(op_type, count, value):
    nodes, last = chain(op_type, count, "k")
    return model([*nodes, node("Reshape", f"x {last}", "y")], X, Y, [constant("k", [value])])


def symbolic_size(op_type, count, symbols):
    inputs = [info("x", FLOAT, [f"a{i}" for i in range(symbols)])]
    nodes, last = chain(op_type, count, "total")
    first = [node("Shape", "x", "s"), node("ReduceSum", "s", "r"), node("Add", "r one", "total")]
    return model(
        [*first, *nodes, node("Expand", f"x {last}", "y")], inputs, Y, [constant("one", [1])]
    )


def folded(op_type, inputs, weights, **attrs):
    """A shape computed from constants."""
    nodes = [
        node(op_type, inputs, "e", **attrs),
        node("Cast", "e", "c", to=INT64),
        node("Reshape", "c all", "u"),
        node("Reshape", "x u", "y"),
    ]
    arrays = [constant(name, array) for name, array in weights.items()]
    return model(nodes, X, Y, [*arrays, constant("all", [-1])])


SIGNAL, TAPS = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32)
ONES = np.ones(4096, np.float32)
BOMBS = {
    "numbers that square": computed_shape("Mul", 45, 1 << 31),
    "numbers that double": computed_shape("Add", 200, 1 << 62),
    "powers of powers": computed_shape("Pow", 6, 9),
    "polynomials that square": symbolic_size("Mul", 24, 2),
    "polynomials of many symbols": symbolic_size("Mul", 12, 20),
    "maxima of maxima": symbolic_size("Max", 24, 2),
    "products over six axes": folded(
        "Einsum", "k k k k k k", {"k": ONES}, equation="a,b,c,d,e,f->"
    ),
    "a window as wide as memory": folded(
        "MaxPool", "k", {"k": SIGNAL}, kernel_shape=[(1 << 33) + 1], pads=[1 << 32, 1 << 32]
    ),
    "padding as wide as memory": folded(
        "Conv", "k w", {"k": SIGNAL, "w": TAPS}, pads=[1 << 32, 1 << 32], strides=[1 << 32]
    ),
    "a size of many factors": model(
        [node("Relu", "x", "y")], [info("x", FLOAT, ["*".join(["(a+b+c+d+e+f+g)"] * 12)])], Y
    ),
    "a rank without end": model([node("Expand", "x s", "y")], [*X, info("s", INT64, [1 << 32])], Y),
    "a tensor of 2^80 elements": model(
        [node("ConstantOfShape", "k", "y")], [], Y, [constant("k", [1 << 40, 1 << 40])]
    ),
    "axes upon axes": model(
        [node("Unsqueeze", "x a", "v0")]
        + [node("Unsqueeze", f"v{i} a", f"v{i + 1}") for i in range(300)],
        X,
        [info("v300", FLOAT, None)],
        [constant("a", [0])],
    ),
    "outputs without number": model([node("Split", "x", "y z", num_outputs=1 << 40)], X, Y),
}


@pytest.mark.parametrize("name", BOMBS)
def test_importing_is_cheap(name):
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        bitwright.load(BOMBS[name])
    except BitwrightError as error:
        assert "memory" not in str(error)
    assert time.process_time() - start < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < MEGABYTES


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "nowhere", "no path"])
def test_only_regular_files_are_opened(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    paths = {
        "folder": tmp_path,
        "pipe": tmp_path / "pipe",
        "device": "/dev/zero",
        "nowhere": tmp_path / "nowhere.onnx",
        "no path": "nul\0byte",
    }
    with pytest.raises(ImportModelError, match="cannot read"):
        bitwright.load(paths[kind])


def test_names_must_be_text():
    proto = model([node("Relu", "x", "y")], X, Y)
    proto.graph.node[0].name = "plain"
    data = proto.SerializeToString().replace(b"plain", b"pl\xff\xfen")
    with pytest.raises(ImportModelError, match="not valid UTF-8"):
        bitwright.load(data)
