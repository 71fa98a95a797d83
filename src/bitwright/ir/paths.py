"""Names of values across nested graphs.

A value of the top-level graph has its name. A value of a body has the path `node/attribute/value`
(nested bodies: `node/attribute/node/attribute/value`), or its bare name if that is unique.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Value, nearest


def value_paths(graph: Graph) -> dict[str, Value]:
    """Every value by its path, values of bodies included; the top-level graph takes precedence."""
    found: dict[str, Value] = {}
    for path, value in _values(graph, ""):
        found.setdefault(path, value)
    return found


def _values(graph: Graph, prefix: str) -> Iterator[tuple[str, Value]]:
    for node in graph.nodes:
        for value in node.outputs:
            yield prefix + value.name, value
    for node in graph.nodes:
        for attribute, body in node.bodies.items():
            yield from _values(body, f"{prefix}{node.name}/{attribute}/")


def find_values(graph: Graph, names: Iterable[str]) -> dict[str, Value]:
    """The value of each name or path; a `GraphError` for an unknown or ambiguous name."""
    paths = value_paths(graph)
    bare: dict[str, list[str]] = {}
    for path, value in paths.items():
        bare.setdefault(value.name, []).append(path)
    found: dict[str, Value] = {}
    for name in names:
        places = [name] if name in paths else bare.get(name, [])
        if not places:
            raise GraphError(
                f"graph {graph.name!r} has no value {name!r}", hint=nearest(name, paths)
            )
        if len(places) > 1:
            raise GraphError(
                f"{len(places)} values of graph {graph.name!r} are named {name!r}",
                expected=f"one of {', '.join(map(repr, places))}",
            )
        found[name] = paths[places[0]]
    return found
