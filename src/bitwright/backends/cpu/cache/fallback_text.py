"""Interpreter fallbacks of a cached model as the text of a graph, and back.

A value that has a buffer becomes an input of the graph. A value without a buffer (a sequence,
strings) stays connected to the fallback that computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.parser import parse
from bitwright.ir.printer import Printer
from bitwright.lir.schedule import InterpreterFallback

Array = np.ndarray[Any, Any]


def fallbacks_to_text(steps: Iterable[InterpreterFallback]) -> tuple[str, Mapping[str, Array]]:
    """The text, and the arrays that it refers to."""
    mapped: dict[Value, Value] = {}
    nodes: list[Node] = []
    for step in steps:
        for value, view in zip(step.op.inputs, step.inputs, strict=True):
            if value is not None and value not in mapped:
                is_held = view is None and value.is_constant
                leaf = (
                    value.node if is_held else Node("input", (), {}, (value.type,), (value.name,))
                )
                nodes.append(leaf)
                mapped[value] = leaf.outputs[0]
        inputs = tuple(None if value is None else mapped[value] for value in step.op.inputs)
        nodes.append(step.op.with_(inputs=inputs))
        mapped.update(zip(step.op.outputs, nodes[-1].outputs, strict=True))
    printer = Printer()
    return printer.graph(Graph("fallbacks", tuple(nodes), ())), printer.blobs


def fallbacks_from_text(text: str, arrays: Mapping[str, Array]) -> list[Node]:
    """The nodes of the fallbacks, in order."""
    return [node for node in parse(text, arrays).nodes if not node.is_boundary]
