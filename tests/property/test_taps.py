"""Every value of random graphs, tapped, against the interpreter; pairs keep names and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_graphs import random_graph
from test_random_graphs import assert_close

from bitwright.errors import RunError
from bitwright.ir.paths import value_paths
from bitwright.ir.types import TensorType
from bitwright.ops.core.interpret import run
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.quant import CalibrationEntry, IntermediateOutputs, insert_q_dq
from bitwright.rewrite.trace import Trace

SEEDS = range(24)


def floating_values(graph: Any) -> dict[str, Any]:
    return {
        path: value
        for path, value in value_paths(graph).items()
        if isinstance(value.type, TensorType) and value.dtype.is_float and value.dtype.bits >= 16
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_taps_show_what_the_interpreter_computes(seed: int) -> None:
    graph, feeds = random_graph(seed)
    graph = eliminate_dead(graph, Trace())
    values = floating_values(graph)
    taps = IntermediateOutputs(graph, values, budget=None if seed % 2 else 256)
    paths = {value: path for path, value in values.items()}
    for inputs in feeds:
        given = {v.name: inputs[v.name] for v in graph.inputs}
        expected: dict[str, list[Any]] = {}

        def observe(value: Any, array: Any, expected: Any = expected) -> None:
            if value in paths:
                expected.setdefault(paths[value], []).append(array)

        try:
            run(graph, given, observe=observe)
        except RunError:  # sizes that do not fit together are refused by both
            with pytest.raises(RunError):
                list(taps.run(given))
            continue
        found: dict[str, list[Any]] = {}
        for name, array in taps.run(given):
            found.setdefault(name, []).append(array.copy())
        assert found.keys() == expected.keys()
        for name, arrays in expected.items():
            for have, want in zip(found[name], arrays, strict=True):
                assert_close(have, want, f"seed {seed}, value {name}")


@pytest.mark.parametrize("seed", SEEDS)
def test_fine_pairs_behind_every_value_change_little_and_only_once(seed: int) -> None:
    graph, feeds = random_graph(seed)
    values = floating_values(graph)
    # a step of 2^-10 of a range of +-32: values beyond saturate, so results may differ, types not
    record = {path: CalibrationEntry.per_tensor(2.0**-10, dtype="i16") for path in values}
    paired = insert_q_dq(graph, record)
    assert insert_q_dq(paired, record) is paired
    assert [name for name, _ in paired.outputs] == [name for name, _ in graph.outputs]
    assert set(value_paths(graph)) <= set(value_paths(paired))
    for inputs in feeds:
        given = {v.name: inputs[v.name] for v in graph.inputs}
        try:
            expected = run(graph, given)
        except RunError:
            continue
        found = run(paired, given)
        for name, want in expected.items():
            assert found[name].dtype == want.dtype
            assert np.shape(found[name])[1:] == np.shape(want)[1:]
