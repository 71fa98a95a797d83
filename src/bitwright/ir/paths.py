"""Names of values across nested graphs.

A value of the graph itself goes by its name. A value of a body goes by its path
`node/attribute/value` (nested bodies: `node/attribute/node/attribute/value`), or by its bare name
where no other value has that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Value, nearest


def value_paths(graph: Graph) -> dict[str, Value]:
    """Every value by its path, those of bodies included; a value of the graph itself wins."""
    found: dict[str, Value] = {}
    for path, value in _walk(graph, ""):
        found.setdefault(path, value)
    return found


def _walk(graph: Graph, prefix: str) -> Iterator[tuple[str, Value]]:
    for node in graph.nodes:
        for value in node.outputs:
            yield prefix + value.name, value
    for node in graph.nodes:
        for attribute, body in node.bodies.items():
            yield from _walk(body, f"{prefix}{node.name}/{attribute}/")


def find_values(graph: Graph, names: Iterable[str]) -> dict[str, Value]:
    """The value of each name or path; an unknown or ambiguous one is an error that names it."""
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
