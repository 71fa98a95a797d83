"""Chooses one precision per unit: least cost within an allowed error.

    minimize    sum of cost(u, precision of u)  +  glue of neighbours of unlike layout
    subject to  sum of error(u, precision of u) <= allowed

`front` adds one unit after the other to lists of non-dominated (error, cost) states, so one pass
gives the optimum for every allowed error. There is one list for each combination of layouts of the
units that later units are glued to, so glue is exact too. Lists longer than `MAX_STATES` are
thinned evenly and stay feasible; beyond `MAX_OPEN` units with later neighbours, the least glue is
left out. Everything is deterministic: equal tables give equal assignments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array

MAX_STATES = 4096
MAX_OPEN = 3
_SLACK = 1 + 1e-9
"""Sums of errors in another order may differ in the last bits."""


@dataclass(frozen=True)
class Option:
    """What one precision of a unit costs, and its part of the output's error energy."""

    cost: float
    error: float


@dataclass(frozen=True)
class Glue:
    """A cost between two units, paid if the layouts of their precisions differ."""

    first: str
    second: str
    cost: float


Table = Mapping[str, Mapping[str, Option]]
"""Options by unit and precision."""
Layouts = Mapping[str, str]
"""How values are stored between units, by precision; by default each precision has its own."""
NO_LAYOUTS: Layouts = {}


@dataclass(frozen=True)
class Assignment:
    """A precision per unit."""

    precisions: Mapping[str, str]
    cost: float
    error: float

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.precisions.items())


def evaluate(
    table: Table,
    precisions: Mapping[str, str],
    glue: Iterable[Glue] = (),
    layouts: Layouts = NO_LAYOUTS,
) -> Assignment:
    """The assignment with its cost and error."""
    cost = sum(table[unit][chosen].cost for unit, chosen in precisions.items())
    error = sum(table[unit][chosen].error for unit, chosen in precisions.items())
    cost += sum(one.cost for one in glue if is_paid(one, precisions, layouts))
    return Assignment(dict(precisions), cost, error)


def is_paid(glue: Glue, precisions: Mapping[str, str], layouts: Layouts) -> bool:
    """Whether the layouts of two glued units differ."""
    first, second = precisions[glue.first], precisions[glue.second]
    return layouts.get(first, first) != layouts.get(second, second)


@dataclass
class _States:
    """Non-dominated states of one combination of layouts."""

    errors: Array
    costs: Array
    trace: Array
    """Rows of (group, row in the group, option) of the step before."""


def front(
    table: Table,
    glue: Sequence[Glue] = (),
    layouts: Layouts = NO_LAYOUTS,
    max_states: int = MAX_STATES,
    most: int | None = None,
) -> list[Assignment]:
    """The non-dominated assignments, by increasing error and decreasing cost; at most `most`."""
    edges = _edges(list(table), glue)
    start = _States(np.zeros(1), np.zeros(1), np.zeros((1, 3), np.int64))
    groups: dict[tuple[str, ...], _States] = {(): start}
    open_: list[int] = []
    history: list[list[_States]] = []
    for number, options in enumerate(table.values()):
        after = [i for i in (*open_, number) if any(j > number for j in edges.get(i, ()))]
        history.append(list(groups.values()))
        groups = _step(groups, open_, after, number, options, edges, layouts, max_states)
        open_ = after
    (last,) = groups.values()
    places = _spread(last.errors, most or max_states)
    return [evaluate(table, _traced(table, history, last, int(at)), glue, layouts) for at in places]


def _edges(units: list[str], glue: Sequence[Glue]) -> dict[int, dict[int, float]]:
    """Glue by place of the earlier and of the later unit, with few open places at a time."""
    place = {unit: number for number, unit in enumerate(units)}
    found: dict[int, dict[int, float]] = {}
    for one in glue:
        first, second = sorted((place[one.first], place[one.second]))
        own = found.setdefault(first, {})
        own[second] = own.get(second, 0.0) + one.cost
    for number in range(len(units)):
        open_ = [i for i in range(number + 1) if any(j > number for j in found.get(i, ()))]
        while len(open_) > MAX_OPEN:
            least = min(open_, key=lambda i: sum(c for j, c in found[i].items() if j > number))
            found[least] = {j: c for j, c in found[least].items() if j <= number}
            open_.remove(least)
    return found


def _step(
    groups: dict[tuple[str, ...], _States],
    before: list[int],
    after: list[int],
    number: int,
    options: Mapping[str, Option],
    edges: dict[int, dict[int, float]],
    layouts: Layouts,
    max_states: int,
) -> dict[tuple[str, ...], _States]:
    """The states after one more unit."""
    parts: dict[tuple[str, ...], list[_States]] = {}
    for group, (stored, states) in enumerate(groups.items()):
        known = dict(zip(before, stored, strict=True))
        for place, (name, option) in enumerate(options.items()):
            own = {**known, number: layouts.get(name, name)}
            paid = (edges.get(i, {}).get(number, 0.0) for i in before if known[i] != own[number])
            trace = np.zeros((len(states.errors), 3), np.int64)
            trace[:, 0], trace[:, 1], trace[:, 2] = group, np.arange(len(trace)), place
            made = _States(
                states.errors + option.error, states.costs + option.cost + sum(paid), trace
            )
            parts.setdefault(tuple(own[i] for i in after), []).append(made)
    most = max(16, max_states // len(parts))
    return {stored: _joined(found, most) for stored, found in parts.items()}


def _joined(parts: list[_States], most: int) -> _States:
    """All states of the parts that no other one dominates."""
    errors = np.concatenate([one.errors for one in parts])
    costs = np.concatenate([one.costs for one in parts])
    trace = np.concatenate([one.trace for one in parts])
    kept = _non_dominated(errors, costs)
    kept = kept[_spread(errors[kept], most)]
    return _States(errors[kept], costs[kept], trace[kept])


def _non_dominated(errors: Array, costs: Array) -> Array:
    """Indices by increasing error, each with a lower cost than all before it."""
    order = np.lexsort((costs, errors))
    best = np.minimum.accumulate(costs[order])
    is_better = np.ones(len(order), bool)
    is_better[1:] = costs[order][1:] < best[:-1]
    return np.asarray(order[is_better])


def _spread(errors: Array, most: int) -> Array:
    """Places of at most `most` of the increasing errors: half evenly by place, half by ratio."""
    if len(errors) <= most:
        return np.arange(len(errors))
    half = max(2, most // 2)
    even = np.linspace(0, len(errors) - 1, half).round().astype(np.int64)
    positive = errors[errors > 0]
    ratios = np.geomspace(positive[0], positive[-1], half)
    return np.unique(
        np.concatenate([even, np.searchsorted(errors, ratios)]).clip(0, len(errors) - 1)
    )


def _traced(table: Table, history: list[list[_States]], last: _States, at: int) -> dict[str, str]:
    """The precisions that lead to a final state."""
    found: list[str] = []
    states = last
    for options, groups in zip(reversed(list(table.values())), reversed(history), strict=True):
        group, row, place = (int(n) for n in states.trace[at])
        found.append(list(options)[place])
        states, at = groups[group], row
    return dict(zip(table, reversed(found), strict=True))


def solve(
    table: Table,
    allowed: float,
    glue: Sequence[Glue] = (),
    layouts: Layouts = NO_LAYOUTS,
) -> Assignment | None:
    """The cheapest assignment with at most the allowed error; None if there is none."""
    found = [one for one in front(table, glue, layouts) if one.error <= allowed * _SLACK]
    return min(found, key=lambda one: (one.cost, one.error), default=None)
