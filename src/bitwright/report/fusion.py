"""Lists what was fused and what was not, with reasons: `bitwright explain MODEL --fusion`.

Three passes fuse: `recognize_composites`, `merge_projections` and `fuse_regions`. Regions come from
the final graph, everything else from the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.ir.graph import Graph, Node
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.passes.manager import History

STAGES = ("recognize_composites", "merge_projections", "fuse_regions")


@dataclass(frozen=True)
class Region:
    """The nodes of one kernel."""

    node: str
    anchor: str
    """The op with its own loop nest; empty if all are elementwise."""
    prologue: tuple[str, ...]
    """Ops that compute the anchor's input."""
    epilogue: tuple[str, ...]
    """Ops that the anchor applies before it stores."""


@dataclass(frozen=True)
class Refusal:
    stage: str
    rule: str
    node: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    recognized: dict[str, int]
    """Rules that replaced several nodes by one op, and how often."""
    regions: list[Region]
    unfused: dict[str, int]
    """Ops outside of regions, and how many of each."""
    refusals: list[Refusal]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fusion(history: History) -> FusionReport:
    """The fusion report of a compiled model."""
    graph = history.stages[-1].graph
    events = [event for event in history.trace.events if event.stage in STAGES]
    made = Counter(e.rule for e in events if e.fired and e.stage != STAGES[-1])
    nodes = [node for node in graph.nodes if not node.is_boundary]
    return FusionReport(
        dict(made.most_common()),
        list(_regions(graph)),
        dict(Counter(node.op for node in nodes if node.op != "fused").most_common()),
        [Refusal(e.stage, e.rule, e.node, e.reason) for e in events if not e.fired],
    )


def _regions(graph: Graph) -> Iterator[Region]:
    for node in graph.nodes:
        if node.op != "fused":
            continue
        inner: list[Node] = [n for n in node.attrs["body"].nodes if not n.is_boundary]
        at = next(
            (i for i, n in enumerate(inner) if not is_elementwise(n) and n.op != "cast"), None
        )
        ops = tuple(n.op for n in inner)
        if at is None:
            yield Region(node.name, "", (), ops)
        else:
            yield Region(node.name, ops[at], ops[:at], ops[at + 1 :])
