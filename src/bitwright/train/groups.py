"""Groups of parameters by name pattern: weight decay, learning-rate factor, frozen ones.

Patterns are those of `fnmatch` ("*.bias"); the last one that matches a name counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from bitwright.errors import TrainingError
from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import near_misses
from bitwright.ops.core.reverse import is_differentiable
from bitwright.train.optimizers import PREFIX


def value_of(name: str, patterns: Mapping[str, float], default: float) -> float:
    """The number of the last pattern that matches a name, or the default."""
    found = [value for pattern, value in patterns.items() if fnmatchcase(name, pattern)]
    return float(found[-1]) if found else default


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def require_matches(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise a `TrainingError` that names a pattern without a match."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TrainingError(
                f"the pattern {pattern!r} of {what} matches no parameter",
                hint=near_misses(pattern, names),
            )


def is_trainable(value: Value) -> bool:
    return bool(value.node.attrs.get("trainable", True)) and is_differentiable(value)


def freeze(graph: Graph, patterns: Sequence[str]) -> Graph:
    """The graph with the parameters that match marked as not trainable."""
    if not patterns:
        return graph
    require_matches("freeze", patterns, [value.name for value in graph.parameters])

    def change(node: Node) -> Node:
        if node.op != "parameter" or not matches(node.name, patterns):
            return node
        return node.with_(attrs={**node.attrs, "trainable": False})

    return replace_nodes(graph, change, bodies=False)


def require_free_names(graph: Graph) -> None:
    """Raise a `TrainingError` for names that the states and inputs of a step could have."""
    for value in (*graph.inputs, *graph.parameters, *graph.states):
        if value.name.startswith(PREFIX):
            raise TrainingError(
                f"the name {value.name!r} is reserved for the trainer",
                expected=f"a name that does not start with {PREFIX!r}",
            )
