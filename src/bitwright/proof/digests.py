"""Digests of weights and of the rest of a model: they detect damage, they are not signatures.

A weight's digest is 48 bits of BLAKE2b over its name, type, shape and bytes, as 8 characters.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

from onnx import ModelProto, TensorProto

from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.regions import PROOF_KEY
from bitwright.frontend.onnx.tensor import ELEMENTS
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import string
from bitwright.ir.graph import Graph
from bitwright.ir.printer import to_text

WIDTH = 8
"""Characters of the digest of one weight."""
_BYTES = 6


def array_digest(array: Array) -> str:
    """A digest of the bits, type and shape of an array."""
    if array.dtype == string.numpy:
        return _short(f"{array.shape}".encode(), repr(array.tolist()).encode())
    data = array.tobytes()
    return _short(f"{array.dtype} {array.shape} ".encode(), data)


def onnx_digests(file: ModelFile) -> dict[str, str]:
    """The digest of each initializer, in the order of their names."""
    found = {}
    for index, tensor in enumerate(file.proto.graph.initializer):
        head = f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode()
        found[tensor.name] = _short(head, tensor_bytes(file, index, tensor))
    return dict(sorted(found.items()))


def tensor_bytes(file: ModelFile, index: int, tensor: TensorProto) -> Any:
    """The raw bytes of an initializer, wherever they are; all its fields if it has no raw data."""
    if index in file.weights:
        return file.weights[index]
    if tensor.data_location == TensorProto.EXTERNAL:
        count = 1
        for size in tensor.dims:
            count *= size
        expected = ELEMENTS[tensor.data_type].nbytes(count)
        return file.external_bytes(tensor, expected, f"tensor {tensor.name!r}")
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    return tensor.SerializeToString(deterministic=True)


def onnx_structure(file: ModelFile) -> str:
    """A digest of the model without its initializers and proof."""
    shell = ModelProto()
    shell.CopyFrom(file.proto)
    shell.graph.ClearField("initializer")
    entries = [p for p in file.proto.metadata_props if p.key != PROOF_KEY]
    shell.ClearField("metadata_props")
    shell.metadata_props.extend(entries)
    return _short(shell.SerializeToString(deterministic=True))


def graph_digests(graph: Graph) -> dict[str, str]:
    """The digest of each constant and parameter of a graph and its bodies."""
    found: dict[str, str] = {}
    for owner, node in graph.walk():
        array = node.attrs.get("value") if node.op in ("constant", "parameter", "state") else None
        if array is not None:
            name = node.name if owner is graph else f"{owner.name}/{node.name}"
            while name in found:
                name += "'"
            found[name] = array_digest(array)
    return dict(sorted(found.items()))


def graph_structure(graph: Graph) -> str:
    """A digest of the text of a graph without its data."""
    return _short(to_text(graph, data=False).encode())


def joined(digests: Iterable[str]) -> str:
    return "".join(digests)


def _short(*parts: Any) -> str:
    made = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        made.update(part)
    return base64.b64encode(made.digest()).decode()
