"""The batch axis of a model's inputs: its symbol, and inputs of other batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType

Feeds = dict[str, Any]


def _axes(graph: Graph, symbol: str) -> dict[str, int]:
    """The axis of each input whose size is a symbol."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            for axis, size in enumerate(value.type.shape):
                if str(size) == symbol:
                    found.setdefault(value.name, axis)
    return found


def batch_symbol(graph: Graph) -> str:
    """The symbol in front of the first input with symbols, if inputs use it only by itself.

    Empty if the batch is fixed, or another size is computed from it.
    """
    types = [value.type for value in graph.inputs if isinstance(value.type, TensorType)]
    first = next((type_ for type_ in types if type_.symbols), None)
    if first is None:
        return ""
    name = str(first.shape[0])
    if name not in {symbol.name for symbol in first.symbols}:
        return ""
    for size in (size for type_ in types for size in type_.shape):
        if str(size) != name and name in {s.name for s in getattr(size, "symbols", ())}:
            return ""
    return name


def bound_sizes(graph: Graph, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The values of symbols that are the size of an axis."""
    found: dict[str, int] = {}
    for symbol in graph.input_symbols:
        for name, axis in _axes(graph, symbol.name).items():
            found.setdefault(symbol.name, int(np.asarray(feeds[name]).shape[axis]))
    return found


def with_batch(graph: Graph, feeds: Feeds, symbol: str, batch: int) -> Feeds:
    """The feeds with another batch size: samples are cut or repeated."""
    if not symbol or not batch:
        return feeds
    axes, found = _axes(graph, symbol), dict(feeds)
    for name, axis in axes.items():
        array = np.asarray(feeds[name])
        places = np.arange(batch) % max(array.shape[axis], 1)
        found[name] = np.take(array, places, axis=axis)
    return found


def samples_in(graph: Graph, feeds: Feeds) -> int:
    """The size of the first axis of the first input; 1 without one."""
    shapes = [np.shape(feeds[value.name]) for value in graph.inputs[:1]]
    return max(1, shapes[0][0]) if shapes and shapes[0] else 1
