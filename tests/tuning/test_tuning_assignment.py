"""The assignment of precisions: optimal against brute force, monotone, deterministic."""

from itertools import product

import numpy as np
import pytest

from bitwright.tuning.precision.assignment import Glue, Option, evaluate, front, solve

NAMES = ("f32", "int8-static", "int8-dynamic", "w4")
LAYOUTS = {"w4": "f32"}


def table(units, seed, options=4):
    rng = np.random.default_rng(seed)
    made = {}
    for number in range(units):
        found = {"f32": Option(float(rng.uniform(1, 3)), 0.0)}
        for name in NAMES[1:options]:
            found[name] = Option(float(rng.uniform(0.2, 3)), float(rng.exponential(0.1)))
        made[f"u{number}"] = found
    return made


def brute_force(given, allowed, glue=()):
    every = (
        evaluate(given, dict(zip(given, names, strict=True)), glue, LAYOUTS)
        for names in product(*given.values())
    )
    return min((one for one in every if one.error <= allowed), key=lambda one: one.cost)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("allowed", [0.0, 0.05, 0.2, 10.0])
def test_the_assignment_is_optimal(seed, allowed):
    given = table(5, seed)
    assert solve(given, allowed).cost == pytest.approx(brute_force(given, allowed).cost)


@pytest.mark.parametrize("seed", range(6))
def test_boundaries_between_layouts_are_part_of_the_cost(seed):
    given = table(5, seed, options=3)
    rng = np.random.default_rng(seed)
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 3), (4, 2)]
    glue = [Glue(f"u{i}", f"u{j}", float(rng.uniform(0, 1))) for i, j in pairs]
    found, best = solve(given, 0.3, glue, LAYOUTS), brute_force(given, 0.3, glue)
    assert found.error <= 0.3
    assert found.cost == pytest.approx(evaluate(given, found.precisions, glue, LAYOUTS).cost)
    assert found.cost == pytest.approx(best.cost)


def test_the_front_is_monotone_and_starts_with_float():
    found = front(table(40, 1))
    assert found[0].error == 0 and set(found[0].precisions.values()) == {"f32"}
    errors, costs = zip(*((one.error, one.cost) for one in found), strict=True)
    assert list(errors) == sorted(errors) and list(costs) == sorted(costs, reverse=True)


def test_many_units_stay_near_the_optimum():
    given = table(100, 2)
    for allowed in (0.2, 2.0):
        few, many = (
            [one for one in front(given, max_states=states, most=400) if one.error <= allowed][
                -1
            ].cost
            for states in (1000, 8000)
        )
        assert many * 0.99 <= few <= many * 1.01


def test_nothing_fits_below_the_least_error():
    assert solve({"u": {"int8-static": Option(1.0, 0.5)}}, 0.1) is None


def test_equal_tables_give_equal_assignments():
    assert [one.key for one in front(table(12, 3))] == [one.key for one in front(table(12, 3))]
