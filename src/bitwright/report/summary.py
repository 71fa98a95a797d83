"""What `bitwright inspect` shows: interface, op counts, parameters, operations and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.ir.dim import Size, evaluate
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import TensorType
from bitwright.ops.opdef import Kind
from bitwright.ops.registry import get


@dataclass(frozen=True)
class Summary:
    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    ops: dict[str, int]
    parameters: int
    parameter_bytes: int
    sizes: dict[str, int]
    """The symbolic sizes that operations and memory were evaluated at."""
    flops: int
    uncounted: tuple[str, ...]
    """Ops whose operations are not in `flops`: their number is unknown before they run."""
    activation_bytes: int
    """Most bytes alive at once, inputs and outputs included, when values are freed as they die."""
    host_steps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def node_flops(node: Node) -> Size | None:
    """Operations of one node (a multiply-add is two), symbolic; None if the data decides."""
    opdef = get(node.op)
    outputs = [t for t in node.types if isinstance(t, TensorType)]
    inputs = [v.type if v is not None else None for v in node.inputs]
    if opdef.flops is not None:
        return opdef.flops(inputs, outputs, node.attrs)  # type: ignore[no-any-return]
    if opdef.kind is Kind.ELEMENTWISE:
        return sum((t.count for t in outputs), 0)
    if opdef.kind is Kind.REDUCTION:
        return sum((t.count for t in inputs[:1] if isinstance(t, TensorType)), 0)
    return None if opdef.kind is Kind.COMPUTE or node.bodies else 0


def summarize(graph: Graph, sizes: Mapping[str, int] | None = None) -> Summary:
    """Facts about a graph, with symbolic sizes at `sizes` (1 where none is given)."""
    symbols = {s.name for n in graph.nodes for t in n.types for s in t.symbols}
    at = {name: (sizes or {}).get(name, 1) for name in sorted(symbols)}
    flops, uncounted = 0, set()
    for node in graph.nodes:
        count = node_flops(node)
        if count is None:
            uncounted.add(node.op)
        else:
            flops += evaluate(count, at)
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
        flops=flops,
        uncounted=tuple(sorted(uncounted)),
        activation_bytes=peak_bytes(graph, at),
        host_steps=sum(n.op == "host" for _, n in graph.walk()),
    )


def _nbytes(type_: Any, at: Mapping[str, int]) -> int:
    if not isinstance(type_, TensorType):
        return 0
    return type_.dtype.nbytes(evaluate(type_.count, at))


def peak_bytes(graph: Graph, at: Mapping[str, int]) -> int:
    """The largest sum of live activations over the run."""
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
