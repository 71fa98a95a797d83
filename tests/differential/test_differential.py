"""A short, seeded run of the differential tester, and that it notices what it is there to notice.

`python tests/differential/differential.py --graphs 20000` looks longer.
"""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from onnx_models import random_model

import differential
from bitwright.backends.cpu.runtime.program import Program

GRAPHS, PIECES = 160, 10


@pytest.mark.parametrize("piece", range(PIECES))
def test_random_models_agree_with_the_interpreter_and_onnx_runtime(piece):
    totals = Counter(differential.check(seed) for seed in range(piece, GRAPHS, PIECES))
    assert totals["checked"] > 0.8 * totals.total()


def test_a_model_follows_from_its_seed():
    first, second = (random_model(11).model().SerializeToString() for _ in range(2))
    assert first == second != random_model(12).model().SerializeToString()


def test_models_are_of_many_ops():
    models = [random_model(seed).model() for seed in range(1000)]
    ops = Counter(node.op_type for model in models for node in model.graph.node)
    assert len(ops) > 100
    wanted = {"ConvTranspose", "QLinearConv", "MatMulInteger", "Attention", "Resize", "LSTM"}
    assert wanted <= ops.keys()
    sizes = Counter(
        d.dim_value or d.dim_param
        for model in models
        for value in model.graph.input
        for d in value.type.tensor_type.shape.dim
    )
    assert sizes[1] + sizes[2] > 0.3 * sizes.total()
    assert sizes["n"] and sizes["h"] and sizes[""]


WRONG = {
    "another number": lambda found: {name: array + 1 for name, array in found.items()},
    "another shape": lambda found: {name: array[None] for name, array in found.items()},
    "another type": lambda found: {name: array.astype("c8") for name, array in found.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_noticed(name, monkeypatch):
    seed = next(s for s in range(100) if random_model(s).nodes[0].op_type == "Conv")
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda self, feeds, out=None: WRONG[name](run(self, feeds)))
    with pytest.raises(differential.MismatchError, match="compiled"):
        differential.check(seed)


def test_memory_that_is_read_before_it_is_written_is_noticed(monkeypatch):
    run = Program.run

    def forgetful(self, feeds, out=None):
        found = run(self, feeds)
        for name, array in (out or {}).items():
            array[1:] = found[name][1:]
        return out or found

    monkeypatch.setattr(Program, "run", forgetful)
    with pytest.raises(differential.MismatchError, match="rubbish"):
        for seed in range(20):
            differential.check(seed)


def test_differences_within_noise_are_none():
    wanted = {"y": np.array([1.0, 2.0, 3.0], np.float32)}
    found = {"y": np.array([1.0, 2.5, 3.0], np.float32)}
    assert differential.compare(wanted, wanted, 1e-4) == []
    (difference,) = differential.compare(found, wanted, 1e-4)
    assert "1 of 3 differ, first at [1]: 2.5 instead of 2.0" in str(difference)
    assert differential.compare(found, wanted, 1e-4, {"y": np.array([0, 0.2, 0])}) == []
    assert differential.compare(found, wanted, 1e-4, {"y": np.array([0.2, 0, 0.2])})


def test_the_script_counts_what_came_of_each_model():
    command = [sys.executable, differential.__file__, "--graphs", "4", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    totals = json.loads(done.stdout.strip().splitlines()[-1].replace("'", '"'))
    assert sum(totals.values()) == 4
