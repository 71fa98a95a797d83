"""Repairs of an ONNX file for a runtime: the rewrites that verdicts recommend.

    s8 weight of a product        u8 with zero point 128: no processor saturates (q + 128 is exact)
    DequantizeLinear of a Gemm    an explicit zero point of 0, so that ONNX Runtime fuses it

The results stay the same. The proof of the file is left out, because it describes other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from bitwright.deploy.checking import RULES
from bitwright.deploy.onnxruntime_rules import product_weight
from bitwright.deploy.view import DEQUANTIZE, I8, GraphView, Verdict
from bitwright.errors import ExportError
from bitwright.export.onnx.files import PROTOBUF_LIMIT
from bitwright.frontend.onnx.regions import PROOF_KEY
from bitwright.ir.container import write_atomically
from bitwright.proof.digests import tensor_bytes

ZERO_INPUT = {
    "MatMulInteger": 3,
    "ConvInteger": 3,
    "DynamicQuantizeMatMul": 3,
    "MatMulIntegerToFloat": 5,
    "QLinearConv": 5,
    "QLinearMatMul": 5,
    "QGemm": 5,
    DEQUANTIZE: 2,
}
"""The operand with the weight's zero point."""
SCALE_INPUT = {DEQUANTIZE: 1, "QLinearConv": 4, "QLinearMatMul": 4, "QGemm": 4}
ROUNDS = 3


def repair(
    model: str | Path | ModelProto,
    output: str | Path,
    targets: Iterable[str] = ("onnxruntime-cpu",),
) -> list[str]:
    """Write a copy of the model repaired for the targets; the changes, one sentence each."""
    changes: list[str] = []
    proto = _complete(GraphView(model))
    for _ in range(ROUNDS):
        view = GraphView(proto)
        made: list[str] = []
        for target in targets:
            for node in view.nodes:
                verdict = RULES[target](view).verdict(node)
                text = "" if verdict is None else _repair_node(view, node, verdict)
                made += [text] if text else []
        changes += made
        if not made:
            break
    data = proto.SerializeToString()
    if len(data) > PROTOBUF_LIMIT:
        raise ExportError(f"the repaired model takes {len(data):,} bytes, too many for one file")

    def write(file: IO[bytes]) -> None:
        file.write(data)

    write_atomically(output, write)
    return changes


def _complete(view: GraphView) -> ModelProto:
    """A copy of the model with all its weights inside and without its proof."""
    proto = ModelProto()
    proto.CopyFrom(view.proto)
    for index, tensor in enumerate(proto.graph.initializer):
        if index in view.file.weights or tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = bytes(tensor_bytes(view.file, index, view.graph.initializer[index]))
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
    kept = [entry for entry in proto.metadata_props if entry.key != PROOF_KEY]
    proto.ClearField("metadata_props")
    proto.metadata_props.extend(kept)
    return proto


def _repair_node(view: GraphView, node: NodeProto, verdict: Verdict) -> str:
    """Apply what helps one node; what was done, or empty."""
    if verdict.status == "unsafe":
        return _make_unsigned(view, node)
    if "has no zero point" in verdict.reason:
        for dequantize in map(view.dequantized, node.input[:2]):
            if dequantize is not None and len(dequantize.input) < 3:
                _set_zero(view, dequantize, dequantize.input[0], 0)
        return f"{view.title(node)}: an explicit zero point of 0"
    return ""


def _make_unsigned(view: GraphView, node: NodeProto) -> str:
    found = product_weight(view, node)
    tensor = None if found is None else view.tensor(found[0])
    if found is None or tensor is None or tensor.data_type != I8:
        return ""
    name = found[0]
    readers = view.consumers(name)
    if any(reader.op_type not in ZERO_INPUT for reader in readers):
        return ""
    values = numpy_helper.to_array(tensor).astype(np.int16) + 128
    for reader in readers:
        _set_zero(view, reader, name, 128)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.uint8), name))
    return f"{view.title(node)}: weight {name!r} as u8 with zero point 128"


def _set_zero(view: GraphView, node: NodeProto, weight: str, shift: int) -> None:
    """Give the weight of a node a zero point: the old one plus `shift`."""
    index = ZERO_INPUT[node.op_type]
    name = node.input[index] if len(node.input) > index else ""
    old = view.array(name) if name else None
    if old is None:
        place = SCALE_INPUT.get(node.op_type)
        scale = view.tensor(node.input[place]) if place is not None else None
        old = np.zeros(tuple(scale.dims) if scale is not None else (), np.int8)
    zero = (old.astype(np.int16) + shift).astype(np.uint8 if shift else np.int8)
    while len(node.input) <= index:
        node.input.append("")
    taken = {t.name for t in view.graph.initializer}
    made = f"{weight}.zero_point_{shift}"
    while made in taken:
        made += "_"
    view.graph.initializer.append(numpy_helper.from_array(zero, made))
    node.input[index] = made
