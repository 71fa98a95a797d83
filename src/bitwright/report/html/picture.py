"""The graph section: regions with their place in the picture, times and layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.ir.graph import Graph
from bitwright.report.html.layer_rows import Row
from bitwright.report.html.layout import layered
from bitwright.report.html.regions import Region, Regions

MOST_OPS = 24


def picture(
    graph: Graph,
    found: Regions,
    rows: list[Row],
    seconds: Mapping[Region, float],
) -> dict[str, Any]:
    """Nodes and edges for the page; also writes the number of its node into each layer row."""
    place = {region: number for number, region in enumerate(found.regions)}
    sources = [[place[source] for source in region.sources] for region in found.regions]
    nodes = [_node(region, seconds) for region in found.regions]
    for number, row in enumerate(rows):
        row["node"] = None
        region = found.find(row["value"])
        if region is not None:
            row["node"] = place[region]
            nodes[place[region]]["layers"].append(number)
    for region in found.regions:
        for name in region.outputs:
            sources.append([place[region]])
            nodes.append(_pseudo(name, "output", region))
    layout = layered(sources)
    for node, rank, x in zip(nodes, layout.ranks, layout.x, strict=True):
        node["rank"], node["x"] = rank, x
        if node["layers"]:
            node["name"] = rows[node["layers"][0]]["name"]
    return {
        "name": graph.name,
        "nodes": nodes,
        "edges": [[e.source, e.target, list(e.points)] for e in layout.edges],
        "values": len(graph.nodes),
    }


def _node(region: Region, seconds: Mapping[Region, float]) -> dict[str, Any]:
    anchor = region.anchor
    ops = [node.op for node in region.nodes]
    return {
        "name": region.name,
        "value": anchor.name,
        "op": anchor.op,
        "kind": "input" if anchor.op in ("input", "state") else "op",
        "ops": ops[:MOST_OPS] + ([f"{len(ops) - MOST_OPS} more"] if len(ops) > MOST_OPS else []),
        "type": str(region.tail.types[0]) if region.tail.types else "",
        "seconds": seconds.get(region),
        "layers": [],
    }


def _pseudo(name: str, kind: str, region: Region) -> dict[str, Any]:
    return _node(region, {}) | {"name": name, "op": kind, "kind": kind, "ops": []}
