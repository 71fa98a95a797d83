"""Converts imported bodies to graphs; the values they capture become common inputs."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.frontend.onnx.context import Body
from bitwright.frontend.onnx.frame import live_inputs
from bitwright.ir import Graph, Value


def captures_of(bodies: Sequence[Body]) -> list[Value]:
    """The outer values that the bodies read, each once."""
    found: dict[Value, None] = {}
    for body in bodies:
        live = live_inputs(body.frame, [value for _, value in body.outputs])
        found.update({o: None for o, inner in body.frame.captures.items() if inner in live})
    return list(found)


def finish_body(body: Body, captures: Sequence[Value]) -> Graph:
    """The body as a graph whose last inputs are the captures."""
    inputs = [*body.inputs, *(body.frame.capture(outer) for outer in captures)]
    return body.frame.finish(_distinct(body.outputs), inputs)


def _distinct(outputs: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    names: set[str] = set()
    found = []
    for name, value in outputs:
        while name in names:
            name += "_"
        names.add(name)
        found.append((name, value))
    return found
