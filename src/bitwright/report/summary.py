"""The facts of `bitwright inspect`: interface, op counts, parameters, operations, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.ir.dim import evaluate
from bitwright.ir.feeds import check_sizes
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.flops import flops


@dataclass(frozen=True)
class Summary:
    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    ops: dict[str, int]
    parameters: int
    parameter_bytes: int
    sizes: dict[str, int]
    """The values of symbolic sizes for operations and memory."""
    flops: int
    uncounted: tuple[str, ...]
    """Ops that `flops` does not include, because their count is only known at run time."""
    activation_bytes: int
    """Peak bytes of live values, inputs and outputs included."""
    fallbacks: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(graph: Graph, sizes: Mapping[str, int] | None = None) -> Summary:
    """Facts about a graph with symbolic sizes `sizes` (default 1)."""
    symbols = {s.name for n in graph.nodes for t in n.types for s in t.symbols}
    check_sizes(sizes or {}, symbols, f"graph {graph.name!r}")
    at = {name: (sizes or {}).get(name, 1) for name in sorted(symbols)}
    total, uncounted = 0, set()
    for node in graph.nodes:
        count = flops(node, at)
        if count is None:
            uncounted.add(node.op)
        else:
            total += count
    weights = [v.node.attrs["value"] for v in graph.parameters if "value" in v.node.attrs]
    weights += [v.node.attrs["value"] for v in graph.constants]
    return Summary(
        name=graph.name,
        inputs={v.name: str(v.type) for v in graph.inputs},
        outputs={name: str(v.type) for name, v in graph.outputs},
        ops=dict(Counter(n.op for _, n in graph.walk() if not n.is_boundary).most_common()),
        parameters=sum(w.size for w in weights),
        parameter_bytes=sum(_nbytes(v.type, at) for v in (*graph.parameters, *graph.constants)),
        sizes=at,
        flops=total,
        uncounted=tuple(sorted(uncounted)),
        activation_bytes=peak_bytes(graph, at),
        fallbacks=sum(n.op == "host" for _, n in graph.walk()),
    )


def _nbytes(type_: Any, at: Mapping[str, int]) -> int:
    if not isinstance(type_, TensorType):
        return 0
    return type_.dtype.nbytes(evaluate(type_.count, at))


def peak_bytes(graph: Graph, at: Mapping[str, int]) -> int:
    """The peak bytes of live activations."""
    uses = dict(graph.uses)
    held = {v: _nbytes(v.type, at) for v in graph.inputs}
    live = peak = sum(held.values())
    for node in graph.nodes:
        if node.is_boundary:
            continue
        for value in node.outputs:
            held[value] = _nbytes(value.type, at)
            live += held[value]
        peak = max(peak, live)
        dead = [v for v in node.outputs if not uses.get(v)]
        for value in node.operands:
            uses[value] -= 1
            if not uses[value]:
                dead.append(value)
        live -= sum(held.pop(v, 0) for v in dead)
    return peak
