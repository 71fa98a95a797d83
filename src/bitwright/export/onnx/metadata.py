"""The `metadata_props` of a model: its source, and data that ONNX has no fields for."""

from __future__ import annotations

import json

import numpy as np
from onnx import GraphProto, TensorProto

from bitwright.export.onnx.convert import NEXT
from bitwright.export.onnx.scope import Array, RegionRecord
from bitwright.export.onnx.tensors import byte_length, complete
from bitwright.frontend.onnx import regions
from bitwright.ir.graph import Graph

PREFIX = "bitwright."
IMPORTED = "onnx.meta."
"""The prefix of metadata that the importer read from a file."""
DOC = "onnx.doc"
INITIAL = ".initial"


def metadata_of(graph: Graph) -> dict[str, str]:
    """The metadata of the source file except its regions, the source, bounds of sizes, and states.

    The source is that of the first import: it is kept when the model is exported again.
    """
    found = {
        key.removeprefix(IMPORTED): text
        for key, text in graph.meta.items()
        if key.startswith(IMPORTED) and key != IMPORTED + regions.KEY
    }
    for key, text in graph.meta.items():
        if not key.startswith(IMPORTED) and key != DOC:
            found.setdefault(f"{PREFIX}source.{key.removeprefix('onnx.')}", text)
    bounds = {
        symbol.name: symbol.bound
        for value in graph.values.values()
        for symbol in value.type.symbols
        if symbol.bound is not None
    }
    if bounds:
        found[f"{PREFIX}bounds"] = json.dumps(bounds, sort_keys=True)
    if graph.states:
        found[f"{PREFIX}states"] = json.dumps({s.name: s.name + NEXT for s in graph.states})
    return found


def region_metadata(
    records: list[RegionRecord], graph: GraphProto, arrays: list[tuple[str, Array]]
) -> dict[str, str]:
    """The regions of the written graph and its bodies; `arrays` are its initializers."""
    small = {n: complete(n, a) for n, a in arrays if 0 < byte_length(a) < regions.SMALL}
    found = []
    homes = [(regions.Producers(g), _constants(g, small)) for g in regions.graphs(graph)]
    for record in records:
        operands = ["" if ref is None else ref.name for ref in record.operands]
        reads, outputs = ([ref.name for ref in refs] for refs in (record.reads, record.outputs))
        producers, constants = next(home for home in homes if outputs[-1] in home[0].index)
        _, digest = producers.between([*operands, *reads], outputs, constants.get)
        found.append(regions.Region(record.op, record.attrs, operands, reads, outputs, digest))
    return {regions.KEY: regions.to_json(found)} if found else {}


def _constants(graph: GraphProto, around: dict[str, TensorProto]) -> dict[str, TensorProto]:
    return around | {t.name: t for t in graph.initializer if regions.is_small(t)}


def state_arrays(graph: Graph) -> list[tuple[str, Array]]:
    """The initial values of states that are not zeros."""
    given = [(s.name + INITIAL, s.node.attrs.get("value")) for s in graph.states]
    return [(name, array) for name, array in given if array is not None and np.any(array)]
