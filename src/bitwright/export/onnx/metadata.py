"""Where a model came from, and what ONNX has no place for, as `metadata_props`."""

from __future__ import annotations

import json

import numpy as np

from bitwright.export.onnx.convert import NEXT
from bitwright.export.onnx.scope import Array
from bitwright.ir.graph import Graph

PREFIX = "bitwright."
IMPORTED = "onnx.meta."
"""How the importer marks the metadata of the file itself."""
DOC = "onnx.doc"
INITIAL = ".initial"


def metadata_of(graph: Graph) -> dict[str, str]:
    """What the source file said, where the model came from, bounds of sizes, pairs of states.

    Provenance is that of the first source: a model that comes and goes keeps its origin.
    """
    found = {
        key.removeprefix(IMPORTED): text
        for key, text in graph.meta.items()
        if key.startswith(IMPORTED)
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


def state_arrays(graph: Graph) -> list[tuple[str, Array]]:
    """What states held at first, where that is not zeros."""
    given = [(s.name + INITIAL, s.node.attrs.get("value")) for s in graph.states]
    return [(name, array) for name, array in given if array is not None and np.any(array)]
