"""Imports initializers as trainable parameters or as constants.

A float tensor of more than one element is a parameter, named as in the file, unless every op reads
it as a scale, bound or size. All others are constants. An initializer is read when a node first
uses it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.frame import Frame, Scope
from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.tensor import read_sparse, read_tensor
from bitwright.ir import TensorType, Value, dtype

Array = np.ndarray[Any, Any]
TRAINABLE = frozenset({"f64", "f32", "f16", "bf16"})
CONSTANT_OPERANDS: dict[str, tuple[int, ...]] = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "Clip": (1, 2),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Range": (0, 1, 2),
    "OneHot": (2,),
    "QGemm": (1, 2, 4, 5, 7, 8),
    "QAttention": (3, 4, 6, 7),
    "DynamicQuantizeMatMul": (2, 3),
    "DynamicQuantizeLSTM": (8, 9, 10, 11),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
    "MatMulNBits": (2, 3),
    "MatMulBnb4": (2,),
    "GatherBlockQuantized": (2, 3),
    "QMoE": (3, 6, 9),
}
FROZEN_OPERANDS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),
    "RotaryEmbedding": (1, 2, 3),
    "GroupQueryAttention": (7, 8),
}


class Initializers:
    def __init__(self, file: ModelFile) -> None:
        self.file = file

    def add_to(self, scope: Scope, graph: GraphProto, root: bool) -> None:
        """Define the initializers of a graph in its scope."""
        uses = _uses(graph)
        for index, tensor in enumerate(graph.initializer):
            weight = self.file.weights.get(index) if root else None
            self._add(scope, tensor.name, tensor, weight, uses)
        for sparse in graph.sparse_initializer:
            self._add(scope, sparse.values.name, sparse, None, uses)

    def _add(
        self,
        scope: Scope,
        name: str,
        tensor: TensorProto | SparseTensorProto,
        weight: memoryview | None,
        uses: dict[str, set[tuple[str, int]]],
    ) -> None:
        if not name or scope.defines(name):
            raise ImportModelError("an initializer has no name or one that is taken", found=name)
        make = partial(self._make, scope.frame, name, tensor, weight, uses.get(name, set()))
        scope.pending[name] = make

    def _make(
        self,
        frame: Frame,
        name: str,
        tensor: TensorProto | SparseTensorProto,
        weight: memoryview | None,
        uses: set[tuple[str, int]],
    ) -> Value:
        if isinstance(tensor, SparseTensorProto):
            array = read_sparse(tensor, self.file)
        else:
            array = read_tensor(tensor, self.file, weight)
        type_ = TensorType(dtype(array.dtype), array.shape)
        with frame.b.at(""):
            if _is_parameter(array, uses) and frame.parent is None:
                trainable = not uses or not all(_has_use(FROZEN_OPERANDS, use) for use in uses)
                value = frame.leaf("parameter", name, type_, value=array, trainable=trainable)
            else:
                value = frame.leaf("constant", name, type_, value=array)
        frame.claim(value, name)
        return value


def _uses(graph: GraphProto) -> dict[str, set[tuple[str, int]]]:
    found: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in graph.node:
        for position, name in enumerate(node.input):
            found[name].add((node.op_type, position))
    return found


def _is_parameter(array: Array, uses: set[tuple[str, int]]) -> bool:
    if dtype(array.dtype).name not in TRAINABLE or array.size <= 1:
        return False
    return not uses or not all(_has_use(CONSTANT_OPERANDS, use) for use in uses)


def _has_use(table: dict[str, tuple[int, ...]], use: tuple[str, int]) -> bool:
    return use[1] in table.get(use[0], ())
