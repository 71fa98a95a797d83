"""A layered layout of an acyclic graph: a rank for each box, and a position in the rank.

    rank      longest path from a source; sources move next to their first reader
    order     sweeps by the mean position of neighbours (Sugiyama)
    x         least squares to the neighbours, with a least distance inside a rank

Edges over a few ranks pass through bends, which take space like narrow boxes. Longer ones are
marked: the page draws them only for a selected box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 6
"""Ranks that a drawn edge spans at most."""
SWEEPS = 6
BEND_WIDTH = 0.3
BEND_WEIGHT = 0.05


@dataclass(frozen=True)
class Edge:
    """An edge with the x of its ends and bends, one per rank; no points if it is long."""

    source: int
    target: int
    points: tuple[float, ...]


@dataclass(frozen=True)
class Layout:
    """Ranks and x of boxes, in units of one box with its gap."""

    ranks: list[int]
    x: list[float]
    edges: list[Edge]


def layered(sources: Sequence[Sequence[int]]) -> Layout:
    """The layout of boxes 0 .. n - 1 in topological order; `sources` are those that each reads."""
    ranks = _ranks(sources)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for box, rank in enumerate(ranks):
        rows[rank].append(box)
    above: list[list[int]] = [[] for _ in sources]
    chains: list[tuple[int, int, list[int]]] = []
    count = len(sources)
    for target, read in enumerate(sources):
        for source in read:
            span = ranks[target] - ranks[source]
            if span > LONGEST:
                chains.append((source, target, []))
                continue
            chain = [source]
            for rank in range(ranks[source] + 1, ranks[target]):
                above.append([chain[-1]])
                rows[rank].append(len(above) - 1)
                chain.append(len(above) - 1)
            above[target].append(chain[-1])
            chains.append((source, target, [*chain, target]))
    below: list[list[int]] = [[] for _ in above]
    for box, read in enumerate(above):
        for source in read:
            below[source].append(box)
    x = _positions(rows, above, below, count)
    edges = [Edge(s, t, tuple(round(x[box], 3) for box in chain)) for s, t, chain in chains]
    return Layout(ranks, [round(value, 3) for value in x[:count]], edges)


def _ranks(sources: Sequence[Sequence[int]]) -> list[int]:
    ranks: list[int] = []
    for read in sources:
        ranks.append(max((ranks[source] + 1 for source in read), default=0))
    first: dict[int, int] = {}
    for box in reversed(range(len(sources))):
        if not sources[box] and box in first:
            ranks[box] = first[box] - 1
        for source in sources[box]:
            first[source] = min(first.get(source, ranks[box]), ranks[box])
    return ranks


def _positions(
    rows: list[list[int]], above: list[list[int]], below: list[list[int]], count: int
) -> list[float]:
    """The x of every box and bend."""
    x = [0.0] * len(above)
    for row in rows:
        for place, box in enumerate(row):
            x[box] = place - (len(row) - 1) / 2
    for sweep in range(2 * SWEEPS):
        is_down = sweep % 2 == 0
        for row in rows if is_down else reversed(rows):
            aims = {box: _aim(box, above if is_down else below, x, count) for box in row}
            if sweep < SWEEPS:
                row.sort(key=lambda box: aims[box])
            widths = [1.0 if box < count else BEND_WIDTH for box in row]
            for box, value in zip(row, _spaced(widths, [aims[b] for b in row]), strict=True):
                x[box] = value
    return x


def _aim(box: int, neighbours: list[list[int]], x: list[float], count: int) -> float:
    """The mean of the neighbours; for a box, bends weigh little, so that chains stay straight."""
    weights = [BEND_WEIGHT if box < count <= other else 1.0 for other in neighbours[box]]
    total = sum(w * x[other] for w, other in zip(weights, neighbours[box], strict=True))
    return total / sum(weights) if weights else x[box]


def _spaced(widths: list[float], aims: list[float]) -> list[float]:
    """The positions nearest to the aims (weighted least squares), in order and without overlap.

    With offsets o_i of boxes side by side, x_i - o_i must not decrease: adjacent violators are
    pooled at their mean. Narrow boxes, the bends, weigh little, so that they give way.
    """
    offsets, at = [], 0.0
    for number, width in enumerate(widths):
        at += 0.0 if number == 0 else (widths[number - 1] + width) / 2
        offsets.append(at)
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, count
    for aim, offset, width in zip(aims, offsets, widths, strict=True):
        weight = 1.0 if width == 1.0 else BEND_WEIGHT
        pools.append((weight * (aim - offset), weight, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (a, b, c), (d, e, f) = pools.pop(), pools.pop()
            pools.append((a + d, b + e, c + f))
    shifts = [total / weight for total, weight, count in pools for _ in range(count)]
    return [shift + offset for shift, offset in zip(shifts, offsets, strict=True)]
