"""The weights of a model as operands of its graph.

Matrices stay as the file stores them: the bytes of their rows, in any block format, are the
operand of `block_matmul`. Vectors (norms, biases) become f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.language.stored import ROW_FORMAT, SCALE, StoredTensor
from bitwright.ir.dtype import f32, u8
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.quant.block_formats import FORMATS, OUTLIER, format_named

Array = np.ndarray[Any, Any]


class Weights:
    """Makes parameters of stored tensors, each once, and checks their shapes."""

    def __init__(
        self, b: Builder, tensors: Mapping[str, StoredTensor], where: str, exact: bool
    ) -> None:
        self.b, self.tensors, self.where, self.exact = b, tensors, where, exact
        self._made: dict[str, Value] = {}
        self._rows: dict[Value, Value] = {}
        self.inputs: dict[str, Value] = {}
        """What each matrix is multiplied by."""

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, *shape: int) -> StoredTensor:
        """A stored tensor of this shape; an error names it if the file has none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ImportModelError(f"the model has no tensor {name!r}", where=self.where)
        if tensor.shape != shape:
            raise ImportModelError(
                f"tensor {name!r} has another shape than the configuration says",
                where=self.where,
                expected=list(shape),
                found=list(tensor.shape),
            )
        return tensor

    def vector(self, name: str, *shape: int) -> Value:
        """A small tensor as f32."""
        return self._parameter(name, lambda: dequantized(self.get(name, *shape)))

    def blocks(self, name: str, *shape: int) -> tuple[Value, str]:
        """The bytes of a matrix's rows, and their format."""
        tensor = self.get(name, *shape)
        require_format(tensor, self.where)
        return self._parameter(name, lambda: row_bytes(tensor)), tensor.format

    def linear(
        self, x: Value, name: str, outputs: int, inputs: int, outlier: float = OUTLIER
    ) -> Value:
        """x[n, inputs] times the matrix [outputs, inputs], plus its bias if there is one."""
        if self.get(f"{name}.weight", outputs, inputs).format == ROW_FORMAT:
            return self._linear_by_rows(x, name, outputs)
        blocks, kind = self.blocks(f"{name}.weight", outputs, inputs)
        self.inputs[f"{name}.weight"] = x
        bias = self.vector(f"{name}.bias", outputs) if f"{name}.bias" in self else None
        attrs = {"format": kind, "exact": self.exact, "outlier": outlier}
        y: Value = self.b.block_matmul(x, blocks, bias, **attrs)
        return y

    def rows(self, tokens: Value, name: str, count: int, width: int) -> Value:
        """Rows of a table as f32."""
        found: Value
        if self.get(name, count, width).format == ROW_FORMAT:
            q, scale = (self.b.gather(part, tokens, axis=0) for part in self._row_parts(name))
            scale = self.b.reshape(scale, shape=(*tokens.shape, 1))
            found = self.b.mul(self.b.cast(q, to=f32), scale)
            return found
        blocks, kind = self.blocks(name, count, width)
        found = self.b.block_gather(blocks, tokens, format=kind)
        return found

    def _linear_by_rows(self, x: Value, name: str, outputs: int) -> Value:
        """A product of integers: activations get a scale and a zero point for each row of x."""
        b, weight = self.b, f"{name}.weight"
        self.inputs[weight] = x
        q, scale = self._row_parts(weight)
        w = b.dequantize(b.transpose(q, perm=(1, 0)), scale, None, axis=1)
        y: Value = b.matmul(x if self.exact else self._quantized(x), w)
        if f"{name}.bias" in self:
            y = b.add(y, self.vector(f"{name}.bias", outputs))
        return y

    def _row_parts(self, name: str) -> tuple[Value, Value]:
        """The integers i8[rows, K] and scales [rows] of a matrix whose rows have one scale."""
        tensor = self.tensors[name]
        scale = self._parameter(f"{name}{SCALE}", lambda: tensor.scale)
        return self._parameter(name, lambda: tensor.data), scale

    def _quantized(self, x: Value) -> Value:
        """Rows of x in 8 bits, once for all products that read them."""
        if x not in self._rows:
            q, scale, zero = self.b.dynamic_quantize(x, to=u8, per_token=True)
            size = x.shape[-1]
            self._rows[x] = self.b.dequantize(q, scale, zero, axis=-1, block=size)
        return self._rows[x]

    def experts(self, x: Value, name: str, counts: Value, *shape: int) -> Value:
        """Rows of x, sorted by expert, times the matrix of their expert."""
        blocks, kind = self.blocks(name, *shape)
        y: Value = self.b.block_grouped_matmul(x, blocks, counts, format=kind, exact=self.exact)
        return y

    def rms_norm(self, x: Value, name: str, size: int, eps: float) -> Value:
        y: Value = self.b.rms_norm(x, self.vector(f"{name}.weight", size), axis=-1, eps=eps)
        return y

    def layer_norm(self, x: Value, name: str, size: int, eps: float) -> Value:
        scale, bias = (self.vector(f"{name}.{kind}", size) for kind in ("weight", "bias"))
        y: Value = self.b.layer_norm(x, scale, bias, axis=-1, eps=eps)
        return y

    def _parameter(self, name: str, make: Any) -> Value:
        if name not in self._made:
            self._made[name] = self.b.parameter(name, make(), trainable=False)
        return self._made[name]

    def unused(self) -> list[str]:
        return sorted(set(self.tensors) - set(self._made))


def require_format(tensor: StoredTensor, where: str) -> None:
    """Raise if no kernel reads the tensor's format."""
    if tensor.format not in FORMATS and tensor.format != ROW_FORMAT:
        raise UnsupportedError(
            f"tensor {tensor.name!r} has the format {tensor.format}, which is not supported",
            where=where,
            expected=", ".join(FORMATS),
            hint="Convert the file with llama.cpp's llama-quantize.",
        )


def row_bytes(tensor: StoredTensor) -> Array:
    """The bytes of a tensor's rows, u8[..., bytes], without a copy."""
    if not tensor.is_plain:
        return tensor.data
    data = np.ascontiguousarray(tensor.data)
    columns = data.shape[-1] * data.dtype.itemsize
    return data.reshape(-1).view(np.uint8).reshape(*data.shape[:-1], columns)


def dequantized(tensor: StoredTensor) -> Array:
    """The values of a tensor as f32."""
    if tensor.is_plain:
        return np.asarray(tensor.data, np.float32)
    if tensor.scale is not None:
        return tensor.data.astype(np.float32) * tensor.scale[..., None]
    return format_named(tensor.format).dequantize(tensor.data).reshape(tensor.shape)
