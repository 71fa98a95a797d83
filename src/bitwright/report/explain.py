"""What the compiler did to a model or one node: text at each stage, rules, steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bitwright.errors import GraphError
from bitwright.ir.graph import Graph, Node, nearest
from bitwright.ir.printer import node_text
from bitwright.lir.schedule import Schedule
from bitwright.passes.manager import History
from bitwright.rewrite.trace import Event


@dataclass(frozen=True)
class NodeHistory:
    """One node at each stage."""

    name: str
    texts: list[tuple[str, str]]
    """Stage and the text of the node; empty if the node is gone."""
    events: list[Event]
    steps: list[str]
    """The steps that compute the node, with the buffers they write."""

    def as_json(self) -> dict[str, Any]:
        return {
            "node": self.name,
            "stages": [{"stage": s, "text": t} for s, t in self.texts],
            "rules": [{**vars(event), "made": list(event.made)} for event in self.events],
            "steps": self.steps,
        }


def _find(graph: Graph, names: set[str]) -> Node | None:
    return next((n for _, n in graph.walk() if names & set(n.names)), None)


def explain_node(history: History, name: str, schedule: Schedule | None = None) -> NodeHistory:
    """Follow a value by name, and its replacement after a rule replaced it."""
    all_names = {n for s in history.stages for _, node in s.graph.walk() for n in node.names}
    if name not in all_names:
        raise GraphError(f"no stage has a value {name!r}", hint=nearest(name, all_names))
    events = list(history.trace.about(name))
    names = {name}
    texts = []
    for stage in history.stages:
        node = _find(stage.graph, {name})
        if node is None:
            for event in events:
                if event.stage == stage.name and event.fired and event.node in names:
                    names.update(event.made)
            node = _find(stage.graph, names - {name})
        texts.append((stage.name, node_text(node) if node else ""))
    lines = [] if schedule is None else list(_steps(history.stages[-1].graph, schedule, names))
    return NodeHistory(name, texts, events, lines)


def _steps(graph: Graph, schedule: Schedule, names: set[str]) -> Iterator[str]:
    """The steps of the nodes with these names, or of the fused nodes that contain them."""
    found: set[str] = set()
    for node in graph.nodes:
        inner = (n for body in node.bodies.values() for _, n in body.walk())
        if any(names & set(n.names) for n in (node, *inner) if not n.is_boundary):
            found.update(node.names)
    for number, step in enumerate(schedule.steps):
        if step.node in found:
            yield f"step {number}: {step}"
            yield from (f"writes {buffer}" for buffer in step.writes)


@dataclass(frozen=True)
class StageSummary:
    stage: str
    nodes: int
    fired: dict[str, int]
    refused: dict[str, int]


def explain_stages(history: History) -> list[StageSummary]:
    """The number of nodes per stage, and the rules that fired or were refused."""
    rows = []
    for stage in history.stages:
        events = [e for e in history.trace.events if e.stage == stage.name]
        rows.append(
            StageSummary(
                stage.name,
                sum(1 for _, node in stage.graph.walk() if not node.is_boundary),
                dict(Counter(e.rule for e in events if e.fired).most_common()),
                dict(Counter(e.rule for e in events if not e.fired).most_common()),
            )
        )
    return rows
