"""Chooses one precision per unit: least cost within an allowed error.

    minimize    sum of cost(u, precision of u)  +  glue of neighbours of unlike layout
    subject to  sum of error(u, precision of u) <= allowed

Without glue this is a multiple-choice knapsack. `front` adds one unit after the other to a list of
non-dominated (error, cost) states, so one pass gives the optimum for every allowed error. The list
is exact up to `MAX_STATES` states; beyond that it is thinned evenly and stays feasible. Glue is
then lowered by moves of one unit or of two neighbours. Everything is deterministic: equal tables
give equal assignments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array

MAX_STATES = 4096
_SLACK = 1 + 1e-9
"""Sums of errors in another order may differ in the last bits."""


@dataclass(frozen=True)
class Option:
    """What one precision of a unit costs, and its part of the output's error energy."""

    cost: float
    error: float


@dataclass(frozen=True)
class Glue:
    """A cost between two units, paid if exactly one of them has a precision in `layouts`."""

    first: str
    second: str
    cost: float


Table = Mapping[str, Mapping[str, Option]]
"""Options by unit and precision."""


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
    layouts: frozenset[str] = frozenset(),
) -> Assignment:
    """The assignment with its cost and error."""
    cost = sum(table[unit][chosen].cost for unit, chosen in precisions.items())
    error = sum(table[unit][chosen].error for unit, chosen in precisions.items())
    cost += sum(one.cost for one in glue if _is_paid(one, precisions, layouts))
    return Assignment(dict(precisions), cost, error)


def _is_paid(glue: Glue, precisions: Mapping[str, str], layouts: frozenset[str]) -> bool:
    return (precisions[glue.first] in layouts) != (precisions[glue.second] in layouts)


def front(table: Table, max_states: int = MAX_STATES) -> list[Assignment]:
    """The non-dominated assignments without glue, by increasing error and decreasing cost."""
    errors, costs = np.zeros(1), np.zeros(1)
    history: list[tuple[Array, Array]] = []
    for options in table.values():
        names = list(options)
        added = np.array([(options[n].error, options[n].cost) for n in names])
        all_errors = (errors[:, None] + added[:, 0]).reshape(-1)
        all_costs = (costs[:, None] + added[:, 1]).reshape(-1)
        kept = _thinned(_non_dominated(all_errors, all_costs), max_states)
        history.append((kept // len(names), kept % len(names)))
        errors, costs = all_errors[kept], all_costs[kept]
    return [
        Assignment(_traced(table, history, at), float(costs[at]), float(errors[at]))
        for at in range(len(errors))
    ]


def _non_dominated(errors: Array, costs: Array) -> Array:
    """Indices by increasing error, each with a lower cost than all before it."""
    order = np.lexsort((costs, errors))
    best = np.minimum.accumulate(costs[order])
    is_better = np.ones(len(order), bool)
    is_better[1:] = costs[order][1:] < best[:-1]
    return np.asarray(order[is_better])


def _thinned(kept: Array, most: int) -> Array:
    if len(kept) <= most:
        return kept
    places = np.unique(np.linspace(0, len(kept) - 1, most).round().astype(np.int64))
    return np.asarray(kept[places])


def _traced(table: Table, history: list[tuple[Array, Array]], at: int) -> dict[str, str]:
    """The precisions that lead to a final state."""
    found: list[str] = []
    for options, (before, chosen) in zip(
        reversed(list(table.values())), reversed(history), strict=True
    ):
        found.append(list(options)[int(chosen[at])])
        at = int(before[at])
    return dict(zip(table, reversed(found), strict=True))


def solve(
    table: Table,
    allowed: float,
    glue: Sequence[Glue] = (),
    layouts: frozenset[str] = frozenset(),
    states: Sequence[Assignment] | None = None,
) -> Assignment | None:
    """The cheapest assignment with at most the allowed error; None if there is none.

    `states` is the result of `front`, if it is known.
    """
    found = [one for one in (states or front(table)) if one.error <= allowed * _SLACK]
    if not found:
        return None
    if not glue:
        return found[-1]
    starts = [found[-1], found[len(found) // 2], found[0]]
    starts += [one for one in _uniform(table, glue, layouts) if one.error <= allowed * _SLACK]
    improved = [_improved(table, one, allowed, glue, layouts) for one in starts]
    return min(improved, key=lambda one: (one.cost, one.error))


def _uniform(table: Table, glue: Sequence[Glue], layouts: frozenset[str]) -> list[Assignment]:
    """For each precision, the assignment with it wherever a unit has it."""
    names = dict.fromkeys(name for options in table.values() for name in options)
    return [
        evaluate(
            table, {u: name if name in o else next(iter(o)) for u, o in table.items()}, glue, layouts
        )
        for name in names
    ]


def _improved(
    table: Table,
    start: Assignment,
    allowed: float,
    glue: Sequence[Glue],
    layouts: frozenset[str],
) -> Assignment:
    """The assignment after all moves of one unit, or of two neighbours, that lower its cost."""
    precisions = dict(start.precisions)
    near: dict[str, list[Glue]] = {unit: [] for unit in table}
    for one in glue:
        near[one.first].append(one)
        near[one.second].append(one)
    groups = [(unit,) for unit in table] + [(one.first, one.second) for one in glue]
    error = evaluate(table, precisions).error
    is_changed = True
    while is_changed:
        is_changed = False
        for group in groups:
            edges = list(dict.fromkeys(edge for unit in group for edge in near[unit]))

            def local(units: tuple[str, ...] = group, around: list[Glue] = edges) -> float:
                own = sum(table[unit][precisions[unit]].cost for unit in units)
                return own + sum(e.cost for e in around if _is_paid(e, precisions, layouts))

            before = tuple(precisions[unit] for unit in group)
            rest = error - sum(table[u][p].error for u, p in zip(group, before, strict=True))
            best, best_cost, best_error = before, local(), error
            for choice in _choices(table, group):
                total = rest + sum(table[u][p].error for u, p in zip(group, choice, strict=True))
                if total > allowed * _SLACK:
                    continue
                precisions.update(zip(group, choice, strict=True))
                cost = local()
                if cost < best_cost * (1 - 1e-12) - 1e-15:
                    best, best_cost, best_error = choice, cost, total
            precisions.update(zip(group, best, strict=True))
            if best != before:
                is_changed, error = True, best_error
    return evaluate(table, precisions, glue, layouts)


def _choices(table: Table, group: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for unit in group:
        found = [(*before, name) for before in found for name in table[unit]]
    return found
