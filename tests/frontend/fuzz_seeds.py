"""Small valid models for the fuzzer that cover every feature of the readers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.conformance import disk_cases, node_cases
from bitwright.ir import to_text
from bitwright.ir.container import save

MAX_BYTES = 1 << 16
MODEL = "model.onnx"
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass(frozen=True)
class Seed:
    name: str
    data: bytes
    file: str = MODEL
    beside: dict[str, bytes] = field(default_factory=dict)
    """Other files of the model's folder."""


def info(name: str, code: int = FLOAT, shape: Any = ()) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, code, shape)


def node(op_type: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), **attrs)


def weight(name: str, *shape: int, dtype: Any = np.float32) -> TensorProto:
    count = int(np.prod(shape))
    values = (np.arange(count) % 11 - 5).astype(dtype).reshape(shape)
    return numpy_helper.from_array(values, name)


def model(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), **options: Any) -> ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    graph.sparse_initializer.extend(options.pop("sparse", ()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    opsets += [helper.make_opsetid("local", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10, **options)
    helper.set_model_props(proto, {"made": "for fuzzing"})
    return proto


def _network() -> ModelProto:
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f v", "y", transB=1),
    ]
    weights = [weight("w", 12, 3, 3, 3), weight("b", 12), weight("v", 100, 12)]
    return model(nodes, [info("x", FLOAT, ["n", 3, 6, 6])], [info("y", FLOAT, ["n", 100])], weights)


def _shapes() -> ModelProto:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Unsqueeze", "n axis", "nn"),
        node("Concat", "nn rest", "t", axis=0),
        node("Reshape", "x t", "y"),
        node("Slice", "y starts ends", "z"),
        node("Concat", "nn six", "t2", axis=0),
        node("Expand", "z t2", "e"),
        node("Range", "zero_s n one_s", "r"),
        node("Tile", "r repeats", "o"),
        node("Split", "e parts", "e0 e1", axis=1),
        node("Pad", "e0 pads", "q"),
    ]
    integers = {
        "zero": np.array(0),
        "axis": np.array([0]),
        "rest": np.array([-1]),
        "six": np.array([6]),
        "starts": np.array([0]),
        "ends": np.array([1]),
        "zero_s": np.array(0),
        "one_s": np.array(1),
        "repeats": np.array([3]),
        "parts": np.array([2, 4]),
        "pads": np.array([0, 1, 0, 2]),
    }
    weights = [numpy_helper.from_array(array, name) for name, array in integers.items()]
    inputs = [info("x", FLOAT, ["n", 2, 3])]
    outputs = [info("o", INT64, None), info("q", FLOAT, None), info("e1", FLOAT, None)]
    return model(nodes, inputs, outputs, weights)


def _control() -> ModelProto:
    then = helper.make_graph([node("Add", "x x", "t")], "then", [], [info("t", FLOAT, [2])])
    other = helper.make_graph([node("Relu", "x", "e")], "else", [], [info("e", FLOAT, [2])])
    step = helper.make_graph(
        [
            node("Add", "state x", "next"),
            node("If", "on", "chosen", then_branch=then, else_branch=other),
            node("Identity", "on", "on_out"),
        ],
        "body",
        [info("i", INT64), info("on", BOOL), info("state", FLOAT, [2])],
        [info("on_out", BOOL), info("next", FLOAT, [2]), info("chosen", FLOAT, [2])],
    )
    scanned = helper.make_graph(
        [node("Add", "sum row", "sum_out"), node("Identity", "sum_out", "kept")],
        "scanned",
        [info("sum", FLOAT, [2]), info("row", FLOAT, [2])],
        [info("sum_out", FLOAT, [2]), info("kept", FLOAT, [2])],
    )
    nodes = [
        node("Loop", "trips on x", "last rows", body=step),
        node("Scan", "x rows", "total all", body=scanned, num_scan_inputs=1),
    ]
    inputs = [info("x", FLOAT, [2]), info("on", BOOL)]
    weights = [numpy_helper.from_array(np.array(3), "trips")]
    return model(nodes, inputs, [info("total", FLOAT, [2]), info("all", FLOAT, None)], weights)


def _functions() -> ModelProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    scale = node("LeakyRelu", "a", "b")
    scale.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    inner = helper.make_function("local", "Leaky", ["a"], ["b"], [scale], opsets, ["slope"])
    outer = helper.make_function(
        "local",
        "Twice",
        ["u"],
        ["w"],
        [node("Leaky", "u", "v", domain="local", slope=0.5), node("Add", "v v", "w")],
        opsets,
    )
    nodes = [node("Twice", "x", "y", domain="local"), node("Twice", "y", "z", domain="local")]
    outputs = [info("z", FLOAT, [3])]
    return model(nodes, [info("x", FLOAT, [3])], outputs, functions=[inner, outer])


def _quantized() -> ModelProto:
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("DequantizeLinear", "w4 ws", "w", axis=0, block_size=2),
        node("MatMul", "d w", "m"),
        node("DynamicQuantizeLinear", "m", "a as az"),
        node("MatMulInteger", "a i8 az", "n"),
        node("Cast", "n", "y", to=FLOAT),
        node("QLinearAdd", "q s z q s z s z", "k", domain="com.microsoft"),
        node("MatMulNBits", "x packed ns", "p", domain="com.microsoft", K=32, N=2, block_size=16),
    ]
    qvalues = helper.make_tensor("w4", TensorProto.INT4, [32, 3], np.arange(96) % 15 - 7)
    weights = [
        numpy_helper.from_array(np.array(0.1, np.float32), "s"),
        numpy_helper.from_array(np.array(3, np.uint8), "z"),
        qvalues,
        weight("ws", 16, 3),
        weight("i8", 3, 4, dtype=np.int8),
        weight("packed", 2, 2, 8, dtype=np.uint8),
        weight("ns", 2, 2),
    ]
    inputs = [info("x", FLOAT, ["n", 32])]
    outputs = [info(name, code, None) for name, code in (("y", FLOAT), ("k", 2), ("p", FLOAT))]
    return model(nodes, inputs, outputs, weights)


def _attention() -> ModelProto:
    nodes = [
        node("Attention", "x w b mask", "a", domain="com.microsoft", num_heads=2),
        node("SkipLayerNormalization", "x a g", "s", domain="com.microsoft"),
        node("Split", "s", "q k v", axis=2, num_outputs=3),
        node(
            "GroupQueryAttention",
            "q k v   lengths total",
            "y pk pv",
            domain="com.microsoft",
            num_heads=2,
            kv_num_heads=2,
        ),
    ]
    nodes[3].input[3:] = ["", "", "lengths", "total"]
    weights = [
        weight("w", 12, 36),
        weight("b", 36),
        weight("g", 12),
        weight("lengths", 2, dtype=np.int32),
        numpy_helper.from_array(np.array([5], np.int32), "total"),
    ]
    inputs = [info("x", FLOAT, [2, 5, 12]), info("mask", TensorProto.INT32, [2, 5])]
    return model(nodes, inputs, [info("y", FLOAT, None), info("pk", FLOAT, None)], weights)


def _tensors() -> ModelProto:
    """Tensors of every element type, in every field for them."""
    nodes, outputs, weights = [], [], []
    for code in range(1, 26):
        name = f"t{code}"
        if code == TensorProto.STRING:
            weights.append(helper.make_tensor(name, code, [2], [b"a", b"bc"]))
        elif code in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
            weights.append(helper.make_tensor(name, code, [2], [1 + 2j, 3j]))
        else:
            weights.append(helper.make_tensor(name, code, [2, 3], [0, 1, 1, 0, 1, 0]))
        outputs.append(info(f"o{code}", code, None))
        nodes.append(node("Identity", name, f"o{code}"))
    nodes.append(node("Constant", "", "c", value=weight("k", 2, 2)))
    nodes.append(node("Constant", "", "f", value_floats=[1.0, 2.0]))
    outputs += [info("c", FLOAT, None), info("f", FLOAT, None)]
    return model(nodes, [], outputs, weights)


def _sparse() -> ModelProto:
    values = numpy_helper.from_array(np.array([1.0, 2.0], np.float32), "m")
    places = numpy_helper.from_array(np.array([[0, 1], [2, 2]]), "places")
    sparse = helper.make_sparse_tensor(values, places, [3, 3])
    linear = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([4.0], np.float32), "l"),
        numpy_helper.from_array(np.array([5]), "at"),
        [3, 3],
    )
    nodes = [node("MatMul", "x m", "u"), node("Constant", "", "k", sparse_value=linear)]
    nodes.append(node("Add", "u k", "y"))
    outputs = [info("y", FLOAT, [3, 3])]
    return model(nodes, [info("x", FLOAT, [3, 3])], outputs, sparse=[sparse])


def _sequences() -> ModelProto:
    nodes = [
        node("SequenceConstruct", "x x", "s"),
        node("SequenceAt", "s at", "y"),
        node("ConcatFromSequence", "s", "z", axis=0),
        node("SequenceLength", "s", "n"),
        node("Optional", "x", "o"),
        node("OptionalGetElement", "o", "g"),
        node("StringConcat", "t t", "w"),
    ]
    weights = [numpy_helper.from_array(np.array(1), "at")]
    inputs = [info("x", FLOAT, [2]), info("t", TensorProto.STRING, [2])]
    names = (("y", FLOAT), ("z", FLOAT), ("n", INT64), ("g", FLOAT), ("w", TensorProto.STRING))
    return model(nodes, inputs, [info(name, code, None) for name, code in names], weights)


def external(locations: dict[str, str] | None = None) -> Seed:
    """A model with two weights as external data, at `locations`."""
    proto = model(
        [node("Add", "x a", "u"), node("Mul", "u b", "y")],
        [info("x", FLOAT, [4])],
        [info("y", FLOAT, [4])],
        [weight("a", 4), weight("b", 4)],
    )
    raw = b"".join(tensor.raw_data for tensor in proto.graph.initializer)
    for index, tensor in enumerate(proto.graph.initializer):
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        given = {"location": "weights.bin", "offset": str(16 * index), "length": "16"}
        for key, value in {**given, **(locations or {})}.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    return Seed("external", proto.SerializeToString(), MODEL, {"weights.bin": raw})


def _as_text_and_bytes(seed: Seed) -> Iterator[Seed]:
    """The same model in bitwright's own formats."""
    graph = load(seed.data)
    yield Seed(f"{seed.name} text", to_text(graph).encode(), "model.txt")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bw"
        save(graph, path)
        yield Seed(f"{seed.name} container", path.read_bytes(), "model.bw")


def own_seeds() -> list[Seed]:
    """Models for each part of the reader, and the demo model."""
    makers = (_network, _shapes, _control, _functions, _quantized, _attention, _tensors, _sparse)
    found = [Seed(m.__name__.strip("_"), m().SerializeToString()) for m in (*makers, _sequences)]
    demo = files("bitwright.demo").joinpath("digits.onnx").read_bytes()
    written = [s for seed in (found[0], found[2]) for s in _as_text_and_bytes(seed)]
    return [*found, external(), Seed("digits", demo), *written]


def official_seeds() -> list[Seed]:
    """The official ONNX cases that are small."""
    cases = [*node_cases(), *disk_cases()]
    made = [Seed(case.name, case.model.SerializeToString()) for case in cases]
    return [seed for seed in made if len(seed.data) <= MAX_BYTES]
